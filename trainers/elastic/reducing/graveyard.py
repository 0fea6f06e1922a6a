"""Where abandoned groups end, on a thread of their own.

The end of a gloo group waits for its unfinished operations, and its `abort()` does nothing. So the
thread first makes the group fail: a receive that nobody will answer runs into a timeout of one
millisecond, upon which gloo closes all connections of the group, and every unfinished operation
fails at once. Only when all works are complete does the thread let the group go.
"""

import contextlib
import queue
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

NOBODY_SENDS = 0x7FFF_0001
"""The tag of the receive that nobody answers. No other operation of ours has a tag."""

POLL = 2e-3


@dataclass(frozen=True, slots=True)
class Remains:
    """A group that nobody uses any more, and the works that may be unfinished."""

    process_group: Any  # torch types none of its methods
    works: tuple[Work, ...]
    rank: int
    size: int


class Graveyard:
    """Ends abandoned groups. Its thread starts with the first one and is joined by `close`."""

    def __init__(self) -> None:
        self._arrivals: queue.SimpleQueue[Remains | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._waiting = 0
        self._forming: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    @property
    def waiting(self) -> int:
        """The number of groups that have not ended yet."""
        with self._lock:
            return self._waiting

    def expect(self, thread: threading.Thread) -> None:
        """Wait, in `close`, for a thread that may still bury a group here."""
        with self._lock:
            self._forming = [known for known in self._forming if known.is_alive()]
            self._forming.append(thread)

    def bury(self, remains: Remains) -> None:
        """Take over a group; the caller keeps no reference to it or to its works."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the graveyard is closed: abandon groups before you close it")
            self._waiting += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="elastic-graveyard")
                self._thread.start()
        self._arrivals.put(remains)

    def close(self) -> None:
        """Wait until every group has ended, and end the thread."""
        for forming in self._forming:
            forming.join()
        self._forming = []
        with self._lock:
            self._closed = True
            thread = self._thread
            self._thread = None
        if thread is not None:
            self._arrivals.put(None)
            thread.join()

    def _run(self) -> None:
        while (remains := self._arrivals.get()) is not None:
            cut(remains)
            while not all(work.is_completed() for work in remains.works):
                time.sleep(POLL)
            del remains
            with self._lock:
                self._waiting -= 1


def cut(remains: Remains) -> None:
    """Close all connections of a group, so that its unfinished works fail."""
    for other in range(remains.size):
        if other != remains.rank:
            with contextlib.suppress(RuntimeError):
                unanswered = remains.process_group.recv([torch.empty(1)], other, NOBODY_SENDS)
                unanswered.wait(timedelta(milliseconds=1))
