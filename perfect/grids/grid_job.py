"""A point of a grid as a job of a fleet: the run that `perfect-train` makes of its YAML alone."""

import io
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.logging import RichHandler

from perfect.assembly import berth_in_fleet
from perfect.commands.training import train_run
from perfect.config.schema import RunConfig, dump_config
from perfect.errors import BuildError, Interrupted, RunFailed
from perfect.runs.folder import RunFolder
from trainers.fleet.hosting.device_process import PROGRAM
from trainers.fleet.jobs.job_left import JobLeft
from trainers.fleet.jobs.seat import Seat
from trainers.fleet.jobs.turns import STOPPED

OUTPUT = "output.txt"
log = logging.getLogger(__name__)

OF_THE_FLEET = (OUTPUT, PROGRAM, STOPPED)
"""Files that the fleet and this program put into a job's folder, beside those of the run."""


@dataclass(frozen=True, slots=True)
class GridJob:
    """The program of one point. It can be pickled."""

    config: RunConfig

    def __call__(self, seat: Seat) -> None:
        folder = RunFolder(seat.folder, also=OF_THE_FLEET)
        with job_output(seat.folder) as console:
            if folder.open(dump_config(self.config)) == "completed":
                return  # a kill came between the end of the run and the fleet's note of it
            try:
                train_run(self.config, folder, berth_in_fleet(seat, console))
            except Interrupted as error:
                raise JobLeft(folder.checkpoint_step() or 0) from error
            except BuildError as error:
                found = [error, *error.others]
                raise RunFailed("; ".join(f"{e.key}: {e.reason}" for e in found)) from error


@contextmanager
def job_output(folder: Path) -> Iterator[Console]:
    """Yield a console that writes into the folder's file; this thread's logging goes there, too.
    Jobs are threads of one process, so a record goes by the thread that wrote it."""
    folder.mkdir(parents=True, exist_ok=True)
    root = logging.getLogger()
    kept = _WhatFits(folder / OUTPUT, "a")
    with io.TextIOWrapper(io.BufferedWriter(kept), encoding="utf-8") as file:
        console = Console(file=file, soft_wrap=True, width=100)
        mine = RichHandler(console=console, show_path=False, show_time=False, show_level=False)
        mine.addFilter(_Thread(threading.get_ident(), passes=True))
        others = list(root.handlers)
        hush = _Thread(threading.get_ident(), passes=False)
        for handler in others:
            handler.addFilter(hush)
        root.addHandler(mine)
        try:
            yield console
        finally:
            root.removeHandler(mine)
            for handler in others:
                handler.removeFilter(hush)
    if kept.left_out:
        log.error("%s lacks words (%s): free some space", folder / OUTPUT, kept.left_out)


class _WhatFits(io.FileIO):
    """Leaves out what has no room on its disk: a job goes on without its words."""

    left_out: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.left_out = error
            return len(data)


class _Thread(logging.Filter):
    """Passes the records of one thread, or those of all others."""

    def __init__(self, thread: int, passes: bool) -> None:
        super().__init__()
        self._thread = thread
        self._passes = passes

    def filter(self, record: logging.LogRecord) -> bool:
        return (record.thread == self._thread) == self._passes
