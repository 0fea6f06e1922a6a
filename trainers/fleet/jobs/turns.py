"""The callback that lets a job run only in its turns.

    on_train_batch_start   is the turn over?   yes: wait for the next one
                           must the job end?   yes: keep its weights, and leave

Everything that follows a step (validation, checkpoints, the end of a pass) comes before the next
`on_train_batch_start`, so it belongs to the turn of its step.
"""

from typing import Any, NoReturn

import lightning as L

from trainers.atomic_checkpoint import written
from trainers.fleet.deciding.events import JobMemory
from trainers.fleet.deciding.fleet_error import FleetError
from trainers.fleet.jobs.job_left import JobLeft
from trainers.fleet.jobs.job_strategy import JobStrategy
from trainers.fleet.jobs.seat import Seat

STOPPED = "stopped.ckpt"
"""The weights of a job that was stopped early."""


def leave_for_good(seat: Seat, trainer: L.Trainer) -> NoReturn:
    """Keep the weights of a job that was stopped early, and leave."""
    if not written(trainer, kept := seat.folder / STOPPED, weights_only=True):
        raise FleetError(
            f"job {seat.name} was stopped at step {trainer.global_step}, and {kept} could not be"
            " written: see the error above, and free some space"
        )
    raise JobLeft(trainer.global_step)


class TurnKeeper(L.Callback):
    """One job's."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    def state_dict(self) -> dict[str, Any]:
        metric = self._seat.metric
        return {} if metric is None else {"metric": metric}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._seat.earlier_metric = state_dict["metric"]

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._seat.attach(trainer)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any, **__: Any
    ) -> None:
        seat = self._seat
        seat.between_steps(lambda: self._without_plan(trainer, pl_module))
        if seat.leave_asked == "stopped":
            leave_for_good(seat, trainer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any, **__: Any
    ) -> None:
        self._seat.batch_over(lambda: self._needed(trainer, pl_module))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._seat.training_over()

    def _without_plan(self, trainer: L.Trainer, module: L.LightningModule) -> JobMemory | None:
        """Return what a job needs that trains without a plan; None if its plan will say it."""
        planned = isinstance(trainer.strategy, JobStrategy)
        return None if planned else self._needed(trainer, module)

    def _needed(self, trainer: L.Trainer, module: L.LightningModule) -> JobMemory:
        """Return what plain Lightning keeps where the kernels run: what the user says, or else the
        bytes of weights, gradients and two averages of them, which is what Adam has."""
        weights = sum(t.nbytes for t in (*module.parameters(), *module.buffers()))
        trained = sum(p.nbytes for p in module.parameters() if p.requires_grad)
        total = self._seat.reserve or weights + 3 * trained
        if trainer.strategy.root_device.type == "cpu":
            return JobMemory(host_bytes=total)
        return JobMemory(host_bytes=0, passing_bytes=weights, device_bytes=total)
