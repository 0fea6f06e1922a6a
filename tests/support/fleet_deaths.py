"""Jobs that end the process they run in, and one that says what it logs. A process that is spawned
imports this file by its name.

a child | job a | job b: SIGSEGV        a new child | job a from its checkpoint | job b: SIGSEGV
"""

import logging
import os
import signal
import warnings
from typing import Any

import lightning as L

from benchmarks.jobs.fleet_jobs import Net
from trainers.fleet.jobs.seat import Seat


class Deadly(Net):
    """It ends its process in its third step, again and again."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 2:
            os.kill(os.getpid(), signal.SIGSEGV)


def deadly() -> Net:
    L.seed_everything(8, verbose=False)
    return Deadly()


def write_levels(seat: Seat) -> None:
    """A job's whole program, which writes what its process logs."""
    levels = [logging.getLogger(name).level for name in ("perfect", "")]
    captured = warnings.showwarning.__module__ == "logging"
    (seat.folder / "levels.txt").write_text(f"{levels} {captured}")
