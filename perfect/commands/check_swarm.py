"""What `perfect-train --check` says of a swarm: lanes, memory, and how well nodes would be used."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import lightning as L

from loaders import ReuseLoader
from offload.sizes import format_size
from perfect.assembly.berth import check_node
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
    # Sums of gradients are flat, and their total is a second one. Exact ones have 8 bytes a number.
    sums = trained * (8 if config.elastic and config.elastic.sum == "fast" else 4 + 8 + 8)
    if config.offload is not None:  # Plans add up elsewhere, and read the totals from there.
        sums += trained * 8
    line = f"a peer holds weights {format_size(weights)}, sums {format_size(sums)}"
    if config.model.class_path is not None:
        return f"{line}, and what your optimizer keeps"
    # AdamW keeps two numbers of each weight, SGD with momentum one.
    kept = 2 if config.optimizer.name == "adamw" else int(config.optimizer.momentum > 0)
    state = 4 * trained * kept
    return f"{line}, optimizer {format_size(state)}: {format_size(weights + sums + state)} in all"


def _prediction(config: RunConfig, given: ElasticConfig, trained: int, out: Path) -> Iterator[str]:
    if given.peers is None or given.network is None:
        yield "utilisation unknown: give elastic.peers and elastic.network, which it depends on"
        return
    seconds = given.seconds_per_sample or _read_seconds(out)
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


def _read_seconds(out: Path) -> float | None:
    """Return the seconds of a sample that this folder's run has measured."""
    folder = RunFolder(out)
    swarm = folder.read().get("elastic") if folder.run.exists() else None
    seconds = swarm.get("seconds_per_sample") if isinstance(swarm, dict) else None
    return float(seconds) if seconds else None


IDLE = 0.05
"""A run that waits for less of its time than this is not made faster by fewer decodes."""


@dataclass(frozen=True, slots=True)
class Feeding:
    """What is known of a run before it begins."""

    phases: Sequence[tuple[float, int]]
    samples: int
    sample_bytes: int
    """Of a decoded sample in a cache."""
    cache_bytes: int
    memory: int
    """Bytes that a cache in RAM might take, of this process."""
    disk: int
    """Bytes that are free where the run's folder lies."""
    stalled: float | None = None
    """The share of an earlier run's time that went into waiting, if there was one."""

    @property
    def whole(self) -> int:
        return self.samples * self.sample_bytes

    def share(self, nbytes: float) -> float:
        return min(1.0, nbytes / self.whole) if self.whole else 1.0


def passes_of(phases: Sequence[tuple[float, int]]) -> float:
    return sum(passes for passes, _ in phases)


def epochs_of(phases: Sequence[tuple[float, int]]) -> float:
    return sum(passes * reuse for passes, reuse in phases)


def decodes_with_cache(passes: float, share: float) -> float:
    """Return the decodes of so many passes, in passes, if the first one caches this share."""
    first = min(1.0, passes)
    return first + (passes - first) * (1 - share)


def even_share(phases: Sequence[tuple[float, int]]) -> float:
    """Return the share of the set from which on a cache without reuse decodes less than reuse
    without a cache: 1 - (P - 1) / (E - 1). It is 0 where a run reuses nothing, and 1 where a run
    ends before a cache is read."""
    passes, epochs = passes_of(phases), epochs_of(phases)
    if epochs == passes:
        return 0.0
    return min(1.0, (epochs - passes) / (epochs - 1)) if epochs > 1 else 1.0


def feeding_lines(run: Feeding) -> Iterator[str]:
    """Yield what each way decodes, and then one piece of advice."""

    def count(passes: float) -> str:
        return f"{round(passes * run.samples):,}"

    here = run.share(run.cache_bytes)
    plain, reuse = epochs_of(run.phases), passes_of(run.phases)
    now = decodes_with_cache(reuse, here)
    yield (
        f"decodes: {count(plain)} without reuse or cache, {count(reuse)} with this reuse alone,"
        f" {count(min(1.0, plain))} with a cache or a converted file of all"
        f" {format_size(run.whole)}; this run {count(now)}"
    )
    yield f"advice: {_advice(run, now)}"


def _advice(run: Feeding, now: float) -> str:
    if run.stalled is not None and run.stalled < IDLE:
        return (
            f"nothing to gain: so far the run waited for samples during {run.stalled:.0%} of its"
            " time, so fewer decodes would not make it faster"
        )
    if now <= 1.0:
        return "nothing to gain: every sample is decoded at most once already"
    if run.whole <= run.memory:
        return (
            f"loader.cache: ram with cache_bytes: {run.whole} would decode every sample once, in"
            f" {format_size(run.whole)} of the {format_size(run.memory)} of memory that are free"
        )
    held = run.share(run.memory)
    on_disk = (
        f"; on disk, where {format_size(run.disk)} are free, a cache or a converted file holds all"
        " of it, decodes every sample once and reads it at every pass"
        if run.whole <= run.disk
        else ""
    )
    too_large = f"the decoded samples take {format_size(run.whole)}, free memory holds {held:.0%}"
    even = even_share(run.phases)
    if not even:
        return f"{too_large}: reuse in the first phase decodes less and needs no such room{on_disk}"
    verdict = "decodes less" if held > even else "decodes more"
    return (
        f"{too_large}: a cache in it {verdict} than this reuse, which a cache equals at {even:.0%}"
        f" ({format_size(round(even * run.whole))}); both together decode least{on_disk}"
    )
