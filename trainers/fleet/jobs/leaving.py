"""How a job leaves its device, and the files that it keeps."""

from pathlib import Path
from typing import NoReturn

import lightning as L

from trainers.atomic_checkpoint import written
from trainers.fleet.deciding.fleet_error import FleetError

LAST, FINAL = "last.ckpt", "final.ckpt"
STOPPED = "stopped.ckpt"
"""The weights of a job that was stopped early."""


class JobLeft(Exception):
    """A job's program raises this when it leaves its device and can resume from its checkpoint."""

    def __init__(self, step: int) -> None:
        """`step`: that of its checkpoint, or of its last weights if it will not resume."""
        super().__init__(f"the job left its device after step {step}")
        self.step = step


def leave_for_good(name: str, folder: Path, trainer: L.Trainer) -> NoReturn:
    """Write the weights of a job that was stopped early, and leave."""
    if not written(trainer, path := folder / STOPPED, weights_only=True):
        raise FleetError(
            f"job {name} was stopped at step {trainer.global_step}, and {path} could not be"
            " written: see the error above, and free some space"
        )
    raise JobLeft(trainer.global_step)
