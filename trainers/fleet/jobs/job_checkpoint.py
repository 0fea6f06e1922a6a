"""A job's checkpoint: written between two batches, by the clock and before the job leaves.

    batch k ........ all hooks of batch k | here | the loader is asked for batch k + 1

Lightning's own place for checkpoints, `on_train_batch_end`, comes before the module's hook of that
name, which a resumed run would leave out. Here nothing of batch k is left to do.
"""

import logging
import time
from typing import Any

import lightning as L
import torch

from trainers.atomic_checkpoint import is_safe, written
from trainers.fleet.jobs.job_turns import LAST, JobLeft
from trainers.fleet.jobs.seat import Seat
from trainers.lightning_seams import results
from trainers.read_checkpoint import not_allowed

SUMS = ("value", "cumulated_batch_size")
CANNOT_GO_ON = (
    "job %s could not go on from %s, which holds objects of %s, and loading them may run code:"
    " allow their classes by torch.serialization.add_safe_globals where you define them"
)
log = logging.getLogger(__name__)


class JobCheckpoint(L.Callback):
    """It is the last callback of the Trainer, so the checkpoint has the states of the others."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._trainer: L.Trainer | None = None
        self._saved_at = 0.0
        self._saved_step = 0
        """The step from which the job would resume."""
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
        self._saved_at, self._saved_step = time.monotonic(), trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        self._safe = is_safe(trainer)
        self._logs.add_earlier(trainer)

    def between_batches(self, taken: int) -> None:
        """Save if it is time to, and leave if the job has to. `taken`: the batches of this pass."""
        trainer, seat = self._trainer, self._seat
        assert trainer is not None
        done = trainer.fit_loop.epoch_loop.batch_progress.current.completed
        due = time.monotonic() - self._saved_at >= seat.settings.checkpoint_seconds
        if not (due or seat.leave_asked) or not self._safe or taken != done:
            return
        if written(trainer, last := seat.folder / LAST):
            if not self._saved_step and (names := not_allowed(last)):
                log.warning(CANNOT_GO_ON, seat.name, last, ", ".join(names))
            self._saved_step = trainer.global_step
        self._saved_at = time.monotonic()
        if seat.leave_asked:
            raise JobLeft(self._saved_step)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._logs.clear()
        if self._seat.leave_asked:
            self._passes_waited += 1
            if self._passes_waited > 1:  # a whole pass had no safe batch, so there will be none
                raise JobLeft(self._saved_step)


class PassLogs:
    """What `self.log(on_epoch=True)` has collected in a pass that is resumed in its middle.

        before   b0 b1 b2: value 3.1 of 3 | checkpoint
        resumed                             b3: value 1.0 of 1, and the earlier 3.1 of 3 | b4 ...

    Lightning's checkpoint does not have it, so the mean would leave out the first part of the pass.
    Metrics of torchmetrics are not kept here: they are states of the module."""

    def __init__(self) -> None:
        self._earlier: dict[str, dict[str, torch.Tensor]] = {}
        """By the name of the log call: the sums of the pass before the checkpoint."""

    def collected(self, trainer: L.Trainer) -> dict[str, dict[str, torch.Tensor]]:
        """Return what the pass has collected so far."""
        return {
            key: {name: getattr(call, name).clone() for name in SUMS if hasattr(call, name)}
            for key, call in _log_calls(trainer).items()
        }

    def resume(self, earlier: dict[str, dict[str, torch.Tensor]]) -> None:
        """Note what the first part of the pass has collected."""
        self._earlier = dict(earlier)

    def add_earlier(self, trainer: L.Trainer) -> None:
        """Add the first part to every log call that has been made since."""
        if not self._earlier:
            return
        for key, call in _log_calls(trainer).items():
            earlier = self._earlier.pop(key, None)
            if earlier is None:
                continue
            if call.meta.is_max_reduction or call.meta.is_min_reduction:
                call.value = call.meta.reduce_fx(earlier["value"], call.value)
                continue
            for name, value in earlier.items():
                setattr(call, name, value + getattr(call, name))

    def clear(self) -> None:
        """Drop the first part, because its pass is over."""
        self._earlier = {}


def _log_calls(trainer: L.Trainer) -> dict[str, Any]:
    """Return the log calls that collect plain numbers over a pass."""
    calls = results(trainer.fit_loop.epoch_loop).items()
    return {key: call for key, call in calls if call.is_tensor and call.meta.on_epoch}
