"""Ends abandoned groups, each on a thread of its own.

The destructor of a gloo group waits for unfinished operations, and its `abort()` does nothing. So a
thread first makes the group fail: a receive that no member answers runs into a timeout of one
millisecond, upon which gloo closes all connections of the group, and every unfinished operation
fails at once, except one in the middle of a message: it fails at its own timeout. When all works
are complete, the thread drops the group.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

NOBODY_SENDS = 0x7FFF_0001
"""The tag of the receive that no member answers. No other operation of ours has a tag."""

POLL = 2e-3


@dataclass(frozen=True, slots=True)
class Remains:
    """An abandoned group, and its works that may be unfinished."""

    process_group: Any  # torch types none of its methods
    works: tuple[Work, ...]
    rank: int
    size: int


class Graveyard:
    """Ends abandoned groups. `close` waits for all of them."""

    def __init__(self) -> None:
        self._burials: list[threading.Thread] = []
        self._forming: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def expect(self, thread: threading.Thread) -> None:
        """Wait, in `close`, for a thread that may still bury a group here."""
        with self._lock:
            self._forming = [*living(self._forming), thread]

    def bury(self, remains: Remains) -> None:
        """Take over a group; the caller keeps no reference to it or to its works."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the graveyard is closed: abandon groups before you close it")
            burial = threading.Thread(target=end, args=(remains,), name="elastic-graveyard")
            self._burials = [*living(self._burials), burial]
            burial.start()

    def close(self) -> None:
        """Wait until every group has ended."""
        for forming in self._forming:
            forming.join()
        self._forming = []
        with self._lock:
            self._closed = True
            burials, self._burials = self._burials, []
        for burial in burials:
            burial.join()


def living(threads: list[threading.Thread]) -> list[threading.Thread]:
    """Return the threads that have begun and not ended."""
    return [thread for thread in threads if thread.is_alive()]


def end(remains: Remains) -> None:
    """Let a group fail, and wait until none of its works is under way."""
    cut(remains)
    while not all(work.is_completed() for work in remains.works):
        time.sleep(POLL)


def cut(remains: Remains) -> None:
    """Close all connections of a group, so that its unfinished works fail."""
    for other in range(remains.size):
        if other != remains.rank:
            with contextlib.suppress(RuntimeError):
                unanswered = remains.process_group.recv([torch.empty(1)], other, NOBODY_SENDS)
                unanswered.wait(timedelta(milliseconds=1))


POLL_SECONDS = 1e-3


class Forming:
    """Forms one group on a thread. `wait` for it once."""

    def __init__(self, make: Callable[[], Any], rank: int, size: int) -> None:
        self._make = make
        self._rank = rank
        self._size = size
        self._made: Any = None  # A group of gloo's; torch types none of its methods.
        self._error: BaseException | None = None
        self._heir: Graveyard | None = None
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elastic-forming", daemon=True)

    def wait(self, alive: Callable[[], None], graveyard: Graveyard) -> Any:
        """Return the group, or raise what the constructor or `alive` raises."""
        self._thread.start()
        try:
            while not self._over.wait(POLL_SECONDS):
                alive()
        except BaseException:
            self._leave_to(graveyard)
            raise
        self._thread.join()
        if self._error is not None:
            raise self._take_error()
        made, self._made = self._made, None
        assert made is not None
        return made

    def _leave_to(self, heir: Graveyard) -> None:
        """Leave the group to a graveyard, now or when it is made, and drop its error."""
        with self._lock:
            self._heir = heir
            made, self._made = self._made, None
            self._error = None
        heir.expect(self._thread)
        if made is not None:
            heir.bury(Remains(made, (), self._rank, self._size))

    def _take_error(self) -> BaseException:
        """Return the error and forget it: its traceback refers to this object, and a cycle would
        wait for the garbage collector."""
        error, self._error = self._error, None
        assert error is not None
        return error

    def _run(self) -> None:
        try:
            made = self._make()
        except BaseException as error:
            with self._lock:
                if self._heir is None:
                    self._error = error
        else:
            with self._lock:
                heir = self._heir
                if heir is None:
                    self._made = made
            if heir is not None:
                heir.bury(Remains(made, (), self._rank, self._size))
            del made
        finally:
            self._over.set()
