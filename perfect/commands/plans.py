"""Makes the plans of a run for `perfect-train --check` of a YAML with `offload:`.

    fit --> hooks, optimizer, first batch --> plan of phase 1 --> batch of phase 2 --> ... --> stop

A fit is started and stopped where its first step would begin, because only there everything is as
in training: the user's hooks have run, the optimizer is made, and a real batch is on its device. No
step runs, and nothing is logged or saved. Phases with the same batch size share a plan, as in
training. With `elastic:` a fit is started for every batch size, and stopped after its first lane.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers.logger import DummyLogger
from rich.console import Console

from offload import Plan
from perfect.assembly import (
    Data,
    berth_alone,
    build_data,
    build_module,
    build_phase_switch,
    build_trainer,
    watched,
)
from perfect.callbacks.phase_switch import PhaseSwitch
from perfect.config.schema import RunConfig
from perfect.errors import BuildError
from perfect.runs.record import RunLog
from trainers import OffloadStrategy
from trainers.elastic.errors import CannotBeElastic
from trainers.elastic.peer.lane_plan_strategy import LanePlanned
from trainers.lightning_seams import before_batch_transfer


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
                batch = _to_device(trainer, next(iter(loader)))
            plan = strategy.plan_for(batch, batch_idx)
            self.plans.append(PhasePlan(tuple(phases), wanted, plan))
        raise _PlansMade


def _to_device(trainer: L.Trainer, batch: Any) -> Any:
    """Convert and move a batch as Lightning does before `training_step`."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = before_batch_transfer(trainer.lightning_module, batch)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def plan_lanes(config: RunConfig, out: Path, console: Console) -> list[PhasePlan]:
    """Return the plan of a lane beside the update, for each batch size of the phases."""
    names: dict[int, list[str]] = {}
    for phase in config.phases:
        names.setdefault(phase.batch_size or config.loader.batch_size, []).append(phase.name)
    return [
        _plan(_with_batch_size(config, size), tuple(phases), out, console)
        for size, phases in names.items()
    ]


def _with_batch_size(config: RunConfig, size: int) -> RunConfig:
    phases = [phase.model_copy(update={"batch_size": size}) for phase in config.phases]
    loader = config.loader.model_copy(update={"batch_size": size})
    return config.model_copy(update={"loader": loader, "phases": phases})


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
