"""Checkpoints that survive: a kill at any moment, a full disk, Ctrl-C, a loss that is not finite.

    write PATH.part -> flush to disk -> rename over PATH      the old file is whole until the new is

Lightning restores a run exactly only from the end of a batch that updates the weights, ends no pass
and is followed by no validation: such a batch is called safe here, and a checkpoint that falls due
elsewhere waits for the next one (docs/decisions/0004).
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from perfect.errors import Interrupted, LossNotFinite

log = logging.getLogger(__name__)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Never leaves half a file under the checkpoint's name."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        target = Path(path)
        part = target.with_name(target.name + ".part")
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, target)
        except OSError as error:
            # Said, not raised: this is rank 0 alone, and the other ranks wait for it at a barrier.
            part.unlink(missing_ok=True)
            log.error(
                "could not write checkpoint %s (%s): the previous one is intact; free some space",
                target,
                error,
            )
        except BaseException:
            part.unlink(missing_ok=True)
            raise


class FiniteLoss(L.Callback):
    """Stops at the first loss that is not finite. Asks the GPU only every `every` batches."""

    reads_weights_between_steps = False
    """Asked by an offloaded run (trainers/readers.py)."""

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
        accumulating = trainer.fit_loop.epoch_loop._should_accumulate()
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
    """Keeps `last.ckpt`: every `every_steps` steps, and when `stop_asked()` says so.

    A save that fails (disk full) is reported and the run goes on with the previous checkpoint.
    """

    reads_weights_between_steps = False
    """Through the strategy, which has them all up to date (trainers/readers.py)."""

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
        self._saved_step = 0
        self._passes_waited = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._saved_step = trainer.global_step
        if trainer.num_training_batches < 3:
            log.warning(
                "a pass has only %s batches: no batch of it is safe to checkpoint after, so an"
                " interrupted run starts anew; lower batch_size",
                trainer.num_training_batches,
            )

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        # Under DDP a signal reaches the ranks at different steps: stop where the first one heard
        # it.
        stop = trainer.strategy.reduce_boolean_decision(self._stop_asked(), all=False)
        due = trainer.global_step - self._saved_step >= self.every_steps
        if (due or stop) and _safe(trainer):
            self._save(trainer)
            if stop:
                raise Interrupted(trainer.global_step)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.strategy.reduce_boolean_decision(self._stop_asked(), all=False):
            return
        self._passes_waited += 1
        if self._passes_waited > 1:  # a whole pass without a safe batch: there will be none
            raise Interrupted(trainer.global_step)

    def _save(self, trainer: L.Trainer) -> None:
        self._finite.check()
        weights = trainer.strategy.lightning_module_state_dict().values()
        if not all(bool(t.isfinite().all()) for t in weights if t.is_floating_point()):
            raise LossNotFinite(trainer.global_step - 1, float("nan"))
        trainer.save_checkpoint(self.path)
        self._saved_step = trainer.global_step


def _safe(trainer: L.Trainer) -> bool:
    loop = trainer.fit_loop.epoch_loop
    assert trainer.fit_loop._data_fetcher is not None
    if loop._num_ready_batches_reached() or loop._should_accumulate():
        return False
    return not loop._should_check_val_fx(trainer.fit_loop._data_fetcher)
