"""A job's checkpoint: written at safe batches, by the clock and before the job leaves."""

import time
from typing import TYPE_CHECKING, Any

import lightning as L

from trainers.atomic_checkpoint import is_safe
from trainers.fleet.jobs.job_left import JobLeft
from trainers.lightning_seams import results, swap_results

if TYPE_CHECKING:
    from trainers.fleet.jobs.seat import Seat

LAST, FINAL = "last.ckpt", "final.ckpt"


class JobCheckpoint(L.Callback):
    """It is the last of the Trainer's callbacks, so the checkpoint has the others' states."""

    reads_weights_between_steps = False
    """It reads weights through the strategy, which first brings them up to date."""

    def __init__(self, seat: "Seat") -> None:
        self._seat = seat
        self._saved = 0.0
        self._passes_waited = 0
        self._results: Any = None
        """What `self.log` had collected in the pass of the checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        return {"results": self._results}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._results = state_dict["results"]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._saved = time.monotonic()
        found, self._results = self._results, None
        if found is not None:
            swap_results(trainer.fit_loop.epoch_loop, found)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        seat = self._seat
        due = time.monotonic() - self._saved >= seat.settings.checkpoint_seconds
        if (due or seat.leave_asked) and is_safe(trainer):
            self._results = results(trainer.fit_loop.epoch_loop)
            trainer.save_checkpoint(seat.folder / LAST)
            self._saved, self._results = time.monotonic(), None
            if seat.leave_asked:
                raise JobLeft(trainer.global_step)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._seat.leave_asked:
            self._passes_waited += 1
            if self._passes_waited > 1:  # a whole pass had no safe batch, so there will be none
                raise JobLeft(trainer.global_step)
