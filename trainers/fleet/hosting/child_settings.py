"""The settings that a spawned process of a fleet takes over from its parent."""

import logging
import signal
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ChildSettings:
    """A spawned process inherits none of them."""

    threads: int
    """Threads of torch: the last bits of some kernels depend on their number."""
    levels: Mapping[str, int]
    """By logger: `perfect-train -v` and `-q` set them."""
    warnings_logged: bool

    @classmethod
    def of_this_process(cls) -> "ChildSettings":
        loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
        named = {each.name: each.level for each in loggers if isinstance(each, logging.Logger)}
        levels = {name: level for name, level in named.items() if level}
        logged = warnings.showwarning.__module__ == logging.__name__
        return cls(torch.get_num_threads(), levels, logged)

    def apply(self) -> None:
        """Set them in the spawned process. It ignores Ctrl-C: its parent ends the jobs."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        torch.set_num_threads(self.threads)
        for name, level in self.levels.items():
            logging.getLogger(name).setLevel(level)
        logging.captureWarnings(self.warnings_logged)
