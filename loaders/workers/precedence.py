"""Which workers begin first, where loaders of one process wait for the turns of their jobs.

    in front | at work ........... | its buffer is full .............. | at work ......
    behind   | begins nothing      | at work, into a buffer of its own | begins nothing

A loader is in front unless somebody has put it behind, and while somebody waits for its next batch.
A worker ends the samples that it has begun. A loader behind begins something only where fewer than
its own `workers` are at work in the whole process.

Nothing here takes a lock that two threads want, because the garbage collector may close a loader
between any two lines. So two workers that begin at the same moment may be one too many.
"""

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress


class Bell:
    """One thread waits for it; any thread may ring, also the garbage collector's."""

    def __init__(self) -> None:
        self._silent = threading.Lock()
        """It is locked unless somebody rang. `wait` locks it again."""
        self._silent.acquire()

    def reset(self) -> None:
        """Forget that somebody rang."""
        self._silent.acquire(blocking=False)

    def ring(self) -> None:
        with suppress(RuntimeError):  # somebody else has rung
            self._silent.release()

    def wait(self, seconds: float = -1) -> bool:
        """Wait until somebody rings, or for so many seconds. Return whether somebody rang."""
        return self._silent.acquire(timeout=seconds)


def may_begin(is_behind: bool, others: int, workers: int) -> bool:
    """Whether a worker begins something while so many `others` of the process are at work."""
    return not is_behind or others < workers


class Attendance:
    """Whether one worker is at work."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self.bell = Bell()

    def begins(self, is_behind: Callable[[], bool]) -> bool:
        """Return whether it may begin something; if not, it is at work no more."""
        if not is_behind():
            process_workers.working.add(self)
            return True
        self.bell.reset()  # what changes from here on rings
        process_workers.waiting.add(self)
        others = len(process_workers.working - {self})
        if may_begin(is_behind(), others, self._workers):
            process_workers.waiting.discard(self)
            process_workers.working.add(self)
            return True
        self.rests()
        return False

    def wait(self) -> None:
        """Wait until something has changed since it was told that it may not begin."""
        self.bell.wait()
        process_workers.waiting.discard(self)

    def rests(self) -> None:
        """Say that it is at work no more."""
        if self in process_workers.working:
            process_workers.working.discard(self)
            process_workers.wake_all()

    def leave(self) -> None:
        """Be at work no more, nor wait for it. It is safe to call this again."""
        self.rests()
        process_workers.waiting.discard(self)


class ProcessWorkers:
    """The workers of this process: those at work, and those that wait until they may begin."""

    def __init__(self) -> None:
        self.working: set[Attendance] = set()
        self.waiting: set[Attendance] = set()

    def wake_all(self) -> None:
        """Have all that wait look again. Any thread may call this."""
        for attendance in self.waiting.copy():
            attendance.bell.ring()

    def begin_anew(self) -> None:
        """Forget all workers, because a forked process has none of them."""
        self.working.clear()
        self.waiting.clear()


process_workers = ProcessWorkers()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=process_workers.begin_anew)


class Precedence:
    """Where one loader stands. Any thread may put it behind, or to the front again. Its copies, in
    this process or another, are those of other loaders: they begin in front."""

    def __init__(self, consumers: Callable[[], Sequence["Precedence"]] | None = None) -> None:
        """`consumers`: of a loader that several read, which is behind while all of them are."""
        self._behind = False
        self._consumers = consumers

    @property
    def gives_way(self) -> bool:
        """Whether its workers give way to those of loaders in front."""
        if self._consumers is None:
            return self._behind
        consumers = self._consumers()
        return len(consumers) > 0 and all(consumer.gives_way for consumer in consumers)

    @gives_way.setter
    def gives_way(self, value: bool) -> None:
        self._behind = value
        process_workers.wake_all()

    def __reduce__(self) -> tuple[type["Precedence"], tuple[()]]:
        return Precedence, ()
