"""The callback that lets a job run only in its turns.

    on_train_batch_start   is the turn over?    yes: wait for the next one
                           must the job stop?   yes: keep its weights, and leave

What follows a step (validation, checkpoints, the end of a pass) comes before the next
`on_train_batch_start`, so it belongs to the turn of its step.
"""

from typing import Any

import lightning as L

from trainers.fleet.deciding.events import JobMemory
from trainers.fleet.jobs.job_strategy import JobStrategy
from trainers.fleet.jobs.leaving import leave_for_good
from trainers.fleet.jobs.seat import Seat


class TurnKeeper(L.Callback):
    """One job's."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._turns = seat.turns

    def state_dict(self) -> dict[str, Any]:
        metric = self._seat.progress.metric
        return {} if metric is None else {"metric": metric}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._seat.progress.checkpoint_metric = state_dict["metric"]

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._seat.progress.trainer = trainer

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any, **__: Any
    ) -> None:
        has_plan = isinstance(trainer.strategy, JobStrategy)
        self._turns.begin_step(lambda: None if has_plan else self._memory(trainer, pl_module))
        if self._seat.leave_asked == "stopped":
            leave_for_good(self._seat.name, self._seat.folder, trainer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any, **__: Any
    ) -> None:
        self._turns.end_batch(lambda: self._memory(trainer, pl_module))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._turns.end_training()

    def _memory(self, trainer: L.Trainer, module: L.LightningModule) -> JobMemory:
        """Return what plain Lightning keeps where the kernels run: what the user says, or else the
        bytes of weights, gradients and two averages of them, as Adam has."""
        weights = sum(t.nbytes for t in (*module.parameters(), *module.buffers()))
        trained = sum(p.nbytes for p in module.parameters() if p.requires_grad)
        total = self._seat.reserve or weights + 3 * trained
        if trainer.strategy.root_device.type == "cpu":
            return JobMemory(host_bytes=total)
        return JobMemory(host_bytes=0, passing_bytes=weights, device_bytes=total)
