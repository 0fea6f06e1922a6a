"""Says what a configuration would run, without training: `perfect-train --check`."""

import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers.logger import DummyLogger
from rich.console import Console
from rich.table import Table

from loaders import ReuseLoader
from loaders.cache.cache import RAM_ENTRY_BYTES
from loaders.order.keyed_permutation import samples_per_rank
from loaders.order.reuse import batches_per_pass, buffered_batches
from loaders.slots.slab import Slab
from offload import Plan
from offload.memory.host_memory import memory_left
from offload.memory.room import check_room
from offload.sizes import format_count, format_size
from perfect.assembly.berth import berth_alone, blamed, watched
from perfect.assembly.data import Data, build_data
from perfect.assembly.phase_plan import build_phase_switch, build_phases
from perfect.assembly.run import build_module, build_trainer
from perfect.callbacks.phase_switch import PhaseSwitch
from perfect.callbacks.train_loaders import in_memory
from perfect.commands.check_swarm import Feeding, feeding_lines, swarm_lines
from perfect.config.schema import RunConfig, dump_config
from perfect.errors import BuildError
from perfect.report.words import count, duration, percent
from perfect.runs.folder import RunFolder
from perfect.runs.record import RunLog
from trainers import OffloadStrategy
from trainers.elastic.errors import CannotBeElastic
from trainers.elastic.peer.elastic_fit import CLOSED_TO_NEWCOMERS
from trainers.elastic.peer.lane_shares import steps_of_pass
from trainers.elastic.peer.replay_strategy import LanePlanned
from trainers.lightning_seams import before_batch_transfer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class PhasePlan:
    """The plan of the step that some phases share."""

    phases: tuple[str, ...]
    batch_size: int
    plan: Plan | None
    """None: these phases would train eagerly."""


class _PlansMade(Exception):
    """Leaves the fit, because all plans are made."""


def plan_phases(
    trainer: L.Trainer, module: L.LightningModule, data: Data, switch: PhaseSwitch
) -> list[PhasePlan]:
    """Return the plans; the first is that of the run's first step. Do not use `trainer` again."""
    planner = _Planner(switch, data.train.batch_size)
    # The other callbacks stay: a plan depends on which of them may read the weights.
    trainer.callbacks.append(planner)  # pyright: ignore[reportAttributeAccessIssue]
    trainer.loggers = [DummyLogger()]
    try:
        trainer.fit(module, **data.fit_arguments())
    except _PlansMade:
        return planner.plans
    finally:
        data.close()
    raise AssertionError("the fit ended before its first batch")


class _Planner(L.Callback):
    def __init__(self, switch: PhaseSwitch, batch_size: int) -> None:
        """`batch_size` is that of phases that do not set one."""
        self.plans: list[PhasePlan] = []
        self._switch = switch
        self._batch_size = batch_size

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        strategy, loader = trainer.strategy, self._switch.loader
        assert isinstance(strategy, OffloadStrategy) and loader is not None
        names: dict[int, list[str]] = {}
        for phase in self._switch.policy.phases:
            names.setdefault(phase.batch_size or self._batch_size, []).append(phase.name)
        for wanted, phases in names.items():
            if wanted != loader.batch_size:
                loader.set_reuse(1, batch_size=wanted)
                # Converted and moved as Lightning does before `training_step`.
                batch = trainer.precision_plugin.convert_input(next(iter(loader)))
                batch = before_batch_transfer(trainer.lightning_module, batch)
                batch = strategy.batch_to_device(batch, dataloader_idx=0)
            plan = strategy.plan_for(batch, batch_idx)
            self.plans.append(PhasePlan(tuple(phases), wanted, plan))
        raise _PlansMade


def plan_lanes(config: RunConfig, out: Path, console: Console) -> list[PhasePlan]:
    """Return the plan of a lane beside the update, for each batch size of the phases."""
    names: dict[int, list[str]] = {}
    for phase in config.phases:
        names.setdefault(phase.batch_size or config.loader.batch_size, []).append(phase.name)
    plans: list[PhasePlan] = []
    for size, of in names.items():
        phases = [phase.model_copy(update={"batch_size": size}) for phase in config.phases]
        loader = config.loader.model_copy(update={"batch_size": size})
        sized = config.model_copy(update={"loader": loader, "phases": phases})
        plans.append(_plan(sized, tuple(of), out, console))
    return plans


def _plan(config: RunConfig, phases: tuple[str, ...], out: Path, console: Console) -> PhasePlan:
    assert config.elastic is not None
    data = build_data(config)
    try:
        module = build_module(config, data.num_classes)
        switch = build_phase_switch(config)
        trainer = build_trainer(config, out, switch, RunLog(out), berth_alone(console), data)
        trainer.loggers = [DummyLogger()]
        with watched(trainer):
            trainer.fit(module, **data.fit_arguments())
    except LanePlanned as planned:
        micro = config.loader.batch_size // config.elastic.lanes
        return PhasePlan(phases, micro, planned.plan)
    except CannotBeElastic as error:
        raise BuildError("offload", str(error)) from error
    finally:
        data.close()
    raise AssertionError("the fit ended before its first lane")


ALIGNED = 64
"""Bytes of gaps in a cached sample, at the most, for a picture and a label."""


def print_plan(config: RunConfig, out: Path, console: Console) -> None:
    """Print the phases, memory and plans of a run. Everything is built, so errors appear here."""
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
    if config.offload is not None:
        of_lanes = config.elastic is not None
        with blamed(), watched(trainer):
            plans = (
                plan_lanes(config, out, console)
                if of_lanes
                else plan_phases(trainer, module, data, switch)
            )
        for made in plans:
            if made.plan is not None:
                check_room(made.plan, made.plan.memgraph.arenas, host_dir=config.offload.host_dir)
            console.print()
            for line in _explain(made, "a lane" if of_lanes else "a step"):
                console.print(line, highlight=False, markup=False)


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
    run = _read_record(config, out)
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


def _read_record(config: RunConfig, out: Path) -> dict[str, Any]:
    """What `out` says of an earlier part of this run. Empty: nothing has run."""
    folder = RunFolder(out)
    if folder.config.exists() and folder.open(dump_config(config)) != "new":
        run = folder.read()
        return run if run.get("steps") else {}
    return {}


def _time(config: RunConfig, out: Path, steps: int) -> str:
    if run := _read_record(config, out):
        seconds = run["wall_seconds"] / run["steps"] * steps
        of = f"as measured over {format_count(run['steps'], 'step')} in {out}"
        return f"time about {duration(seconds)}, {of}"
    return f"time unknown: no step has run in {out} yet"
