"""How the steps of a run would be planned: `perfect-train --check` of a YAML with `offload:`.

    fit --> hooks, optimizer, first batch --> plan of phase 1 --> batch of phase 2 --> ... --> stop

A fit is begun and left where its first step would begin, for only there everything is as in
training: what the user's hooks have made, the optimizer, a real batch on its device. No step is
made, nothing is logged or saved. Phases with batches of one size share a plan, as in training.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
from lightning.pytorch.loggers.logger import DummyLogger

from offload import Plan
from perfect.assembly import Data
from perfect.callback import PhaseSwitch
from trainers import OffloadStrategy


@dataclass(frozen=True, slots=True, eq=False)
class PhasePlan:
    """Of the step of some phases."""

    phases: tuple[str, ...]
    batch_size: int
    plan: Plan | None
    """None: it would train eagerly."""


class _Enough(Exception):
    """The plans are made."""


def plan_phases(
    trainer: L.Trainer, module: L.LightningModule, data: Data, switch: PhaseSwitch
) -> list[PhasePlan]:
    """The first is the one that a run makes at its first step. `trainer` is spent."""
    planner = _Planner(switch, data.train.batch_size)
    # Beside the others: a plan depends on who may look at the weights.
    trainer.callbacks.append(planner)  # pyright: ignore[reportAttributeAccessIssue]
    trainer.loggers = [DummyLogger()]
    try:
        if data.datamodule is not None:
            trainer.fit(module, datamodule=data.datamodule)
        else:
            trainer.fit(module, data.train, data.holdout)
    except _Enough:
        return planner.found
    finally:
        data.close()
    raise AssertionError("a run without a batch")


class _Planner(L.Callback):
    reads_weights_between_steps = False
    """So the plans are those of the run, where it is not."""

    def __init__(self, switch: PhaseSwitch, batch_size: int) -> None:
        """`batch_size`: of phases that name none."""
        self.found: list[PhasePlan] = []
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
                batch = _moved(trainer, next(iter(loader)))
            self._add(phases, wanted, strategy.plan_for(batch, batch_idx))
        raise _Enough

    def _add(self, phases: Sequence[str], batch_size: int, plan: Plan | None) -> None:
        self.found.append(PhasePlan(tuple(phases), batch_size, plan))


def _moved(trainer: L.Trainer, batch: Any) -> Any:
    """As Lightning gives it to `training_step`."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)
