"""Checkpoints that survive a kill at any moment and a full disk, and the batches that allow one.

    write PATH.part -> flush to disk -> rename over PATH   the old file stays until the new is whole

Lightning restores a run exactly only from the end of a batch that updates the weights, does not end
a pass and is not followed by a validation. Such a batch is called safe here, and a checkpoint that
is due elsewhere waits for the next safe batch (docs/decisions/0004).
"""

import logging
import os
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
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, target)
        except OSError as error:
            # This is logged and not raised: the other ranks wait for rank 0 at a barrier.
            part.unlink(missing_ok=True)
            log.error(
                "could not write checkpoint %s (%s): the previous one is intact; free some space",
                target,
                error,
            )
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def is_safe(trainer: L.Trainer) -> bool:
    """Whether Lightning restores a run exactly from a checkpoint at the end of this batch."""
    if is_pass_over(trainer) or is_accumulating(trainer):
        return False
    return not is_validation_due(trainer)
