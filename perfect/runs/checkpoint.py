"""Checkpoints are written at safe batches, before a stop, and never of a loss that is not finite.

A kill at any moment and a full disk leave the last one intact (trainers/atomic_checkpoint.py).
"""

import logging
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from rich.console import Console

from perfect.errors import Interrupted, LossNotFinite
from trainers.atomic_checkpoint import is_safe, written
from trainers.lightning_seams import is_accumulating

log = logging.getLogger(__name__)


class FiniteLoss(L.Callback):
    """Stops the run at the first loss that is not finite; a GPU is asked every `every` batches."""

    def __init__(self, every: int = 20) -> None:
        self.every = every
        self._bad: torch.Tensor | None = None

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is None:  # training_step skipped the batch
            return
        loss = loss.detach().float()
        if self._bad is None:
            self._bad = torch.full((2,), -1.0, device=loss.device)  # step and value of the first
        accumulating = is_accumulating(trainer)
        step = trainer.global_step - (0 if accumulating else 1)
        here = torch.stack([torch.full_like(loss, step), loss])
        first = (self._bad[0] < 0) & ~torch.isfinite(loss)
        self._bad = torch.where(first, here, self._bad)
        if loss.device.type == "cpu" or trainer.global_step % self.every == 0:
            self.check()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.check()

    def check(self) -> None:
        if self._bad is not None and self._bad[0] >= 0:
            step, loss = self._bad.tolist()
            raise LossNotFinite(int(step), loss)


class RunCheckpoint(Checkpoint):
    """Writes `last.ckpt` every `every_steps` steps, and when `stop_asked()` is true.

        batch k   on_train_batch_end    write last.ckpt
                  Lightning logs what batch k has measured: the resumed run will not
        batch k+1 on_train_batch_start  stop, if that was asked for

    In a swarm one peer writes. When it dies, another one writes from then on, and begins at once,
    because the dead one may have died before its last checkpoint.

    If a save fails (disk full), the error is logged and the run keeps the previous checkpoint.
    """

    def __init__(
        self,
        path: Path,
        every_steps: int,
        finite: FiniteLoss,
        stop_asked: Callable[[], bool] = lambda: False,
    ) -> None:
        self.path = path
        self.every_steps = every_steps
        self._finite = finite
        self._stop_asked = stop_asked
        self._due_from = 0
        self._saved_step = 0
        self.not_saved_since: int | None = None
        """The step of the newest checkpoint, if one that came after it could not be written."""
        self._passes_waited = 0
        self._stops = False
        self._writes = True
        """Whether this process is the one that writes."""
        self._overdue = False
        """Whether it became the one that writes during the run, and has not written yet."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._due_from = self._saved_step = trainer.global_step
        self._writes = trainer.is_global_zero
        if trainer.num_training_batches < 3:
            log.warning(
                "a pass has only %s batches, and no checkpoint can be written after any of them, so"
                " an interrupted run would start anew; lower batch_size",
                trainer.num_training_batches,
            )

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        # Under DDP a signal reaches the ranks at different steps: all stop with the first one.
        stop = trainer.strategy.reduce_boolean_decision(self._stop_asked(), all=False)
        if trainer.is_global_zero and not self._writes:
            self._overdue = True
            log.info("this peer writes the checkpoints from step %d on", trainer.global_step)
        self._writes = trainer.is_global_zero
        due = trainer.global_step - self._due_from >= self.every_steps or self._overdue
        if (due or stop) and is_safe(trainer):
            self._save(trainer)
            self._stops = stop

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if self._stops:
            raise Interrupted(trainer.global_step)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.strategy.reduce_boolean_decision(self._stop_asked(), all=False):
            return
        self._passes_waited += 1
        if self._passes_waited > 1:  # a whole pass had no safe batch, so there will be none
            raise Interrupted(trainer.global_step)

    def _save(self, trainer: L.Trainer) -> None:
        self._finite.check()
        weights = trainer.strategy.lightning_module_state_dict().values()
        if not all(bool(t.isfinite().all()) for t in weights if t.is_floating_point()):
            raise LossNotFinite(trainer.global_step - 1, float("nan"))
        saved = written(trainer, self.path)
        self._overdue = False
        self._due_from = trainer.global_step
        self._saved_step = trainer.global_step if saved else self._saved_step
        self.not_saved_since = None if saved else self._saved_step


SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignal(L.Callback):
    """Receives signals. RunCheckpoint calls `is_requested()` after each batch."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._requested = False
        self._before: list[Any] = []

    def is_requested(self) -> bool:
        return self._requested

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Lightning installs its own SIGTERM handler when fit() begins, so ours comes after it.
        self._before = [signal.signal(number, self._receive) for number in SIGNALS]

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._restore()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in zip(SIGNALS, self._before, strict=False):
            signal.signal(number, handler)
        self._before = []

    def _receive(self, _number: int, _frame: FrameType | None) -> None:
        if self._requested:
            raise KeyboardInterrupt
        self._requested = True
        self._console.print("stopping after a checkpoint (press Ctrl-C again to stop at once)")
