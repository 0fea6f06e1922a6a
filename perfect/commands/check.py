"""Says what a configuration would run, without training: `perfect-train --check`."""

import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from loaders import ReuseLoader
from loaders.cache.cache import RAM_ENTRY_BYTES
from loaders.order.reuse import batches_per_pass, buffered_batches
from loaders.order.source_order import samples_per_rank
from loaders.slots.slab import Slab
from offload import OffloadError
from offload.memory.host_memory import memory_left
from offload.memory.room import check_room
from offload.sizes import format_count, format_size
from perfect.assembly import (
    berth_alone,
    build_data,
    build_module,
    build_phase_switch,
    build_phases,
    build_trainer,
    to_blame,
    watched,
)
from perfect.callbacks.train_loaders import in_memory
from perfect.commands.check_swarm import swarm_lines
from perfect.commands.feeding_advice import Feeding, feeding_lines
from perfect.commands.plans import PhasePlan, plan_lanes, plan_phases
from perfect.config.schema import RunConfig, dump_config
from perfect.report.words import count, duration, percent
from perfect.runs.folder import RunFolder
from perfect.runs.record import RunLog
from trainers.elastic.peer.elastic_fit import CLOSED_TO_NEWCOMERS
from trainers.elastic.peer.lane_shares import steps_of_pass

log = logging.getLogger(__name__)

ALIGNED = 64
"""Bytes of gaps in a cached sample, at the most, for a picture and a label."""


def print_plan(config: RunConfig, out: Path, console: Console) -> None:
    """Print the phases, memory and plans of a run. Everything is built and one sample is decoded,
    so that errors appear here and not in training."""
    log.info("looking at the data: %s", config.data.class_path or config.data.root)
    data = build_data(config, prepare=False)
    module = build_module(config, data.num_classes)
    phases, rule = build_phases(config)
    switch = build_phase_switch(config)
    trainer = build_trainer(config, out, switch, RunLog(out), berth_alone(console), data)
    loader = data.train
    samples = samples_per_rank(len(loader.dataset), config.trainer.devices)

    first = "first serves" if in_memory(loader) else "decodes"
    table = Table("phase", "passes", "reuse", "batch", "steps", first, "learning rate")
    closed: set[str] = set()
    steps_in_all = decodes_in_all = served_in_all = largest = 0
    walked: list[tuple[float, int]] = []
    for phase in phases:
        batch = phase.batch_size or loader.batch_size
        largest = max(largest, batch)
        if config.elastic is not None:
            lanes = config.elastic.lanes
            per_pass = steps_of_pass(loader, lanes, batch // lanes, phase.reuse)
            closed |= {phase.name} if per_pass == 1 else set()
        else:
            per_pass = batches_per_pass(samples, batch, phase.reuse, loader.mode, loader.drop_last)
        steps = phase.steps or (phase.passes or 0) * -(-per_pass // config.trainer.accumulate)
        passes = steps * config.trainer.accumulate / per_pass
        walked.append((passes, phase.reuse))
        served = round(passes * samples * phase.reuse)
        steps_in_all += steps
        served_in_all += served
        decodes_in_all += round(passes * samples)
        rate = f"{phase.lr.kind} {phase.lr.lr:g}" if phase.lr else "the module's"
        table.add_row(
            phase.name, f"{passes:g}", str(phase.reuse), str(batch), count(steps),
            count(round(passes * samples)), rate,
        )  # fmt: skip
    console.print(table)

    saved = percent(1 - decodes_in_all / served_in_all)
    say = [
        f"training samples {count(len(loader.dataset))}; hold-out {_size(data.holdout)};"
        f" test {_size(data.test)}",
        f"steps {count(steps_in_all)}; served {count(served_in_all)};"
        f" {first} {count(decodes_in_all)}"
        + (
            "; the data set is in memory, so nothing is decoded"
            if in_memory(loader)
            else f" ({saved} fewer than serving each decode once)"
        ),
        *_memory(config, loader, largest),
    ]
    if rule is not None:
        say.append(
            f"plateau: the rule may end the reuse phase from epoch {rule.not_before:g} on; it looks"
            f" at windows of {rule.window} checks; the lengths above are those without it"
        )
    if config.elastic is not None:
        say += swarm_lines(config, module, loader, out)
        say += [f"warning: phase {name}: {CLOSED_TO_NEWCOMERS}" for name in sorted(closed)]
    elif not in_memory(loader):
        say += feeding_lines(_feeding(config, loader, out, walked, samples))
    say.append(_time(config, out, steps_in_all))
    for line in say:
        console.print(line, highlight=False)
    if config.offload is not None and config.trainer.devices > 1:
        console.print(
            "offload: each rank makes its plan at its first step, so no plan is shown; set"
            " devices: 1 to see one, without the averaging of gradients",
            highlight=False,
        )
    elif config.offload is not None:
        of_lanes = config.elastic is not None

        def make() -> list[PhasePlan]:
            if of_lanes:
                return plan_lanes(config, out, console)
            with watched(trainer):
                return plan_phases(trainer, module, data, switch)

        for made in _blamed(make):
            if made.plan is not None:
                check_room(made.plan, made.plan.memgraph.arenas, host_dir=config.offload.host_dir)
            console.print()
            for line in _explain(made, "a lane" if of_lanes else "a step"):
                console.print(line, highlight=False, markup=False)


def _blamed(make: Callable[[], list[PhasePlan]]) -> list[PhasePlan]:
    """Return the plans, or raise the error with the key of the YAML that caused it."""
    try:
        return make()
    except OffloadError as error:
        if refused := to_blame(error):
            raise refused from error
        raise


def _explain(made: PhasePlan, what: str) -> Iterator[str]:
    of = f"phase{'s' if len(made.phases) > 1 else ''} {', '.join(made.phases)}"
    yield f"{what} of {of}, batches of {made.batch_size}"
    if made.plan is None:
        yield "it trains eagerly, without a plan: the warning above says why"
    else:
        yield made.plan.explain()


def _size(loader: object) -> str:
    dataset = getattr(loader, "dataset", None)
    return count(len(dataset)) if dataset is not None else "none"


def _memory(config: RunConfig, loader: ReuseLoader, batch: int) -> Iterator[str]:
    """Say how much memory samples take in the buffer and in the cache, by decoding one of them."""
    sample, limit = Slab(loader.dataset[0], 1).nbytes, loader.buffer_bytes
    most = max(phase.reuse for phase in config.phases)
    kept = buffered_batches(loader.mode, most, loader.buffer_batches)
    whole = sample * min(batch * kept, len(loader.dataset))
    batches = f"({format_count(kept, 'batch')} of at most {batch})"
    if in_memory(loader):
        yield f"buffer 0 B {batches}: the data set is in memory already"
    elif limit is None:
        yield f"buffer {format_size(whole)} {batches}"
    else:
        yield (
            f"buffer {format_size(min(whole, limit))} or less {batches}; with the batches under way"
            f" at most {format_size(limit)}"
        )
    if config.loader.cache is not None and config.loader.cache_bytes is not None:
        limit, needed = config.loader.cache_bytes, sample * len(loader.dataset)
        where = config.loader.cache_dir or "RAM"
        share = f"{min(1.0, limit / needed):.0%}" if needed else "all"
        yield (
            f"decoded cache in {where}: at most {format_size(limit)}, about {share} of the"
            f" {format_size(needed)} that all training samples take"
        )


def _feeding(
    config: RunConfig,
    loader: ReuseLoader,
    out: Path,
    phases: Sequence[tuple[float, int]],
    samples: int,
) -> Feeding:
    run = _measured(config, out)
    # A cache keeps more of a sample than its bytes: what Python keeps, and gaps between parts.
    entry = Slab(loader.dataset[0], 1).nbytes + RAM_ENTRY_BYTES + ALIGNED
    place = next(path for path in (out, *out.absolute().parents) if path.exists())
    return Feeding(
        phases, samples, entry,
        cache_bytes=config.loader.cache_bytes or 0,
        memory=memory_left().nbytes // config.trainer.devices,
        disk=shutil.disk_usage(place).free,
        stalled=run["stall_seconds"] / run["wall_seconds"] if run else None,
    )  # fmt: skip


def _measured(config: RunConfig, out: Path) -> dict[str, Any]:
    """What `out` says of an earlier part of this run. Empty: nothing has run."""
    folder = RunFolder(out)
    if folder.config.exists() and folder.open(dump_config(config)) != "new":
        run = folder.read()
        return run if run.get("steps") else {}
    return {}


def _time(config: RunConfig, out: Path, steps: int) -> str:
    if run := _measured(config, out):
        seconds = run["wall_seconds"] / run["steps"] * steps
        of = f"as measured over {format_count(run['steps'], 'step')} in {out}"
        return f"time about {duration(seconds)}, {of}"
    return f"time unknown: no step has run in {out} yet"
