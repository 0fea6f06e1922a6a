"""Sends what a job says into a file of its folder, instead of onto the screen.

    job's thread    -- logging, progress, report's path --> output.txt
    other threads   -- logging ---------------------------> the screen

Jobs are threads of one process, so a record of logging goes by the thread that wrote it.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

OUTPUT = "output.txt"


@contextmanager
def job_output(folder: Path) -> Iterator[Console]:
    """Yield a console that writes into the folder's file; this thread's logging goes there, too."""
    folder.mkdir(parents=True, exist_ok=True)
    root = logging.getLogger()
    with (folder / OUTPUT).open("a", encoding="utf-8") as file:
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


class _Thread(logging.Filter):
    """Passes the records of one thread, or those of all others."""

    def __init__(self, thread: int, passes: bool) -> None:
        super().__init__()
        self._thread = thread
        self._passes = passes

    def filter(self, record: logging.LogRecord) -> bool:
        return (record.thread == self._thread) == self._passes
