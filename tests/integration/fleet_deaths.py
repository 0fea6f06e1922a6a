"""Jobs that end the process they run in. A process that is spawned imports this file by its name.

a child | job a | job b: SIGSEGV        a new child | job a from its checkpoint | job b: SIGSEGV
"""

import os
import signal
from typing import Any

import lightning as L

from benchmarks.twins.fleet_jobs import Net


class Deadly(Net):
    """It ends its process in its third step, again and again."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 2:
            os.kill(os.getpid(), signal.SIGSEGV)


def deadly() -> Net:
    L.seed_everything(8, verbose=False)
    return Deadly()
