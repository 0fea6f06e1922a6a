"""What `perfect-train --check` says of a swarm: lanes, memory, and how well nodes would be used."""

from collections.abc import Iterator
from pathlib import Path

import lightning as L

from loaders import ReuseLoader
from offload.sizes import format_size
from perfect.assembly import check_node
from perfect.config.elastic_schema import ElasticConfig, parse_bandwidth
from perfect.config.schema import RunConfig
from perfect.runs.folder import RunFolder
from trainers.elastic.deciding.utilisation import (
    ASKED,
    ENOUGH_LANES,
    Nodes,
    least_global_batch,
    predict,
)
from trainers.elastic.peer.lane_shares import steps_of_pass


def swarm_lines(
    config: RunConfig, module: L.LightningModule, loader: ReuseLoader, out: Path
) -> Iterator[str]:
    given = config.elastic
    assert given is not None
    check_node(given)
    batch = config.loader.batch_size
    micro = batch // given.lanes
    steps = steps_of_pass(loader, given.lanes, micro, config.phases[0].reuse)
    yield (
        f"swarm: {given.lanes} lanes of {micro} samples are a step of {batch}, whoever is there;"
        f" {steps:,} steps a pass of {config.phases[0].name}"
    )
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    yield _memory(config, module, trained)
    if given.peers is not None and given.lanes < ENOUGH_LANES * given.peers:
        each = given.lanes / given.peers
        yield (
            f"warning: {each:.3g} lanes for each of {given.peers} peers are few, and peers wait for"
            f" the slowest: raise elastic.lanes to {ENOUGH_LANES * given.peers} or more"
        )
    yield from _prediction(config, given, trained, out)


def _memory(config: RunConfig, module: L.LightningModule, trained: int) -> str:
    weights = sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))
    # Gradients are summed flat, and the total is another one; exact sums have 8 bytes a number.
    sums = trained * (8 if config.elastic and config.elastic.sum == "fast" else 4 + 8 + 8)
    if config.offload is not None:  # Plans add up elsewhere, and read the totals from there.
        sums += trained * 8
    said = f"a peer holds weights {format_size(weights)}, sums {format_size(sums)}"
    if config.model.class_path is not None:
        return f"{said}, and what your optimizer keeps"
    # AdamW keeps two numbers of each weight, SGD with momentum one.
    kept = 2 if config.optimizer.name == "adamw" else int(config.optimizer.momentum > 0)
    state = 4 * trained * kept
    return f"{said}, optimizer {format_size(state)}: {format_size(weights + sums + state)} in all"


def _prediction(config: RunConfig, given: ElasticConfig, trained: int, out: Path) -> Iterator[str]:
    if given.peers is None or given.network is None:
        yield "utilisation unknown: give elastic.peers and elastic.network to reckon with"
        return
    seconds = given.seconds_per_sample or _measured(out)
    where = f"{given.peers} peers at {given.network}"
    if seconds is None:
        yield (
            f"{where}: utilisation unknown, as no step has run in {out}: give"
            " elastic.seconds_per_sample"
        )
        return
    bandwidth = parse_bandwidth(given.network)
    nodes = Nodes(given.peers, bandwidth, trained, seconds, exact=given.sum == "exact")
    use = predict(nodes, config.loader.batch_size, given.lanes)
    yield (
        f"{where}: compute {use.compute:.3g} s, wire {use.wire:.3g} s, headers and vote"
        f" {use.commit:.3g} s a step: utilisation {use.utilisation:.0%}"
    )
    least = least_global_batch(nodes, given.lanes)
    if least is None:
        yield (
            f"{given.lanes} lanes on {given.peers} peers cannot be dealt evenly enough for"
            f" {ASKED:.0%}: raise elastic.lanes"
        )
    else:
        yield f"a global batch of {least:,} or more keeps it at {ASKED:.0%}"


def _measured(out: Path) -> float | None:
    """Return the seconds of a sample that this folder's run has measured."""
    folder = RunFolder(out)
    swarm = folder.read().get("elastic") if folder.run.exists() else None
    found = swarm.get("seconds_per_sample") if isinstance(swarm, dict) else None
    return float(found) if found else None
