"""How a process of a fleet behaves, as far as the process that starts it decides that."""

import logging
import signal
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ChildManners:
    """What a spawned process gets, because it inherits none of it."""

    threads: int
    """The number of threads decides the last bits of some kernels."""
    levels: Mapping[str, int]
    """What each logger says: `perfect-train -v` and `-q` set that."""
    warnings_logged: bool

    @classmethod
    def of_this_process(cls) -> "ChildManners":
        loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
        named = {one.name: one.level for one in loggers if isinstance(one, logging.Logger)}
        levels = {name: level for name, level in named.items() if level}
        logged = warnings.showwarning.__module__ == logging.__name__
        return cls(torch.get_num_threads(), levels, logged)

    def adopt(self) -> None:
        """Behave so, in the spawned process. Ctrl-C is for its parent, which ends the jobs."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        torch.set_num_threads(self.threads)
        for name, level in self.levels.items():
            logging.getLogger(name).setLevel(level)
        logging.captureWarnings(self.warnings_logged)
