"""Checkpoints that survive a kill at any moment and a full disk, and the batches that allow one.

    write PATH.part -> flush to disk -> rename over PATH   the old file stays until the new is whole

Lightning restores a run exactly only from the end of a batch that updates the weights, does not end
a pass and is not followed by a validation. Such a batch is called safe here, and a checkpoint that
is due elsewhere waits for the next safe batch (docs/decisions/0004).
"""

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from trainers.lightning_seams import is_accumulating, is_pass_over, is_validation_due

log = logging.getLogger(__name__)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints so that no half-written file has the checkpoint's name."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        target = Path(path)
        part = target.with_name(target.name + ".part")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, target)
        except BaseException as error:
            with suppress(OSError):  # the folder may be read-only
                part.unlink(missing_ok=True)
            # torch raises a RuntimeError of its own while it handles that of the file.
            of_disk = error if isinstance(error, OSError) else error.__context__
            if not (isinstance(error, OSError | RuntimeError) and isinstance(of_disk, OSError)):
                raise
            # This is logged and not raised: the other ranks wait for rank 0 at a barrier.
            left = "the previous one is intact" if target.exists() else "there is none yet"
            log.error(
                "could not write checkpoint %s (%s): %s; free some space", target, of_disk, left
            )


def written(trainer: L.Trainer, path: Path, weights_only: bool = False) -> bool:
    """Write a checkpoint, and return whether it is there now. On a full disk it is not: that is
    logged with its reason, and the file that was there before stays. Only rank 0 knows."""
    before = _file_number(path)
    trainer.save_checkpoint(path, weights_only=weights_only)
    return not trainer.is_global_zero or _file_number(path) != before


def _file_number(path: Path) -> int | None:
    """A new file takes the old one's place, so it has another number."""
    return path.stat().st_ino if path.exists() else None


def is_safe(trainer: L.Trainer) -> bool:
    """Whether Lightning restores a run exactly from a checkpoint at the end of this batch."""
    if is_pass_over(trainer) or is_accumulating(trainer):
        return False
    return not is_validation_due(trainer)
