"""A job's checkpoint: written between two batches, by the clock and before the job leaves.

    batch k ........ all hooks of batch k | here | the loader is asked for batch k + 1

Lightning's own place for checkpoints, `on_train_batch_end`, comes before the module's hook of that
name, which a resumed run would leave out. Here nothing of batch k is left to do, and the loader and
the dice are where the next batch finds them.
"""

import logging
import time
from typing import TYPE_CHECKING, Any

import lightning as L

from trainers.atomic_checkpoint import is_safe, written
from trainers.fleet.jobs.job_left import JobLeft
from trainers.fleet.jobs.pass_logs import PassLogs
from trainers.read_checkpoint import not_allowed

if TYPE_CHECKING:
    from trainers.fleet.jobs.seat import Seat

LAST, FINAL = "last.ckpt", "final.ckpt"
CANNOT_GO_ON = (
    "job %s could not go on from %s, which holds objects of %s, and loading them may run code:"
    " allow their classes by torch.serialization.add_safe_globals where you define them"
)
log = logging.getLogger(__name__)


class JobCheckpoint(L.Callback):
    """It is the last of the Trainer's callbacks, so the checkpoint has the others' states."""

    def __init__(self, seat: "Seat") -> None:
        self._seat = seat
        self._trainer: L.Trainer | None = None
        self._saved = 0.0
        self._saved_step = 0
        """The step from which the job would go on."""
        self._safe = False
        self._passes_waited = 0
        self._logs = PassLogs()

    def state_dict(self) -> dict[str, Any]:
        assert self._trainer is not None
        return {"logs": self._logs.collected(self._trainer)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._logs.resume(state_dict["logs"])

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._trainer = trainer

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._saved, self._saved_step = time.monotonic(), trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        self._safe = is_safe(trainer)
        self._logs.add_earlier(trainer)

    def between_batches(self, taken: int) -> None:
        """Save if it is time to, and leave if the job was asked to. `taken`: the batches that the
        loader has given in this pass."""
        trainer, seat = self._trainer, self._seat
        assert trainer is not None
        done = trainer.fit_loop.epoch_loop.batch_progress.current.completed
        due = time.monotonic() - self._saved >= seat.settings.checkpoint_seconds
        if not (due or seat.leave_asked) or not self._safe or taken != done:
            return
        if written(trainer, last := seat.folder / LAST):
            if not self._saved_step and (names := not_allowed(last)):
                log.warning(CANNOT_GO_ON, seat.name, last, ", ".join(names))
            self._saved_step = trainer.global_step
        self._saved = time.monotonic()
        if seat.leave_asked:
            raise JobLeft(self._saved_step)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._logs.forget()
        if self._seat.leave_asked:
            self._passes_waited += 1
            if self._passes_waited > 1:  # a whole pass had no safe batch, so there will be none
                raise JobLeft(self._saved_step)
