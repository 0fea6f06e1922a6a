"""As many workers as threads read at once, each lent to one thread at a time.

A worker is a process (`processes`), or a thread that may be left behind (`reading_thread`).
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from loaders.errors import PassEnded
from loaders.slots.leaves import Chunk, Fetch


class Lendable(Protocol):
    """A worker that reads for whoever has borrowed it."""

    def read(self, ids: Sequence[int], keys: Sequence[int] = (), frozen: bool = False) -> Chunk: ...

    def stop(self) -> None:
        """Tell it to end, without waiting for it."""
        ...

    def close(self) -> None:
        """End it."""
        ...


Worker = TypeVar("Worker", bound=Lendable)


class WorkerPool(Generic[Worker]):
    """At most `most` workers, made when they are needed. A thread borrows one for a chunk, and
    gives it back when it needs the chunk's samples no longer."""

    def __init__(self, make: Callable[[int], Worker], most: int) -> None:
        """`make` makes a worker of its number."""
        self._make = make
        self._most = most
        self._idle: list[Worker] = []
        self._all: list[Worker] = []
        self._closed = False
        self._lock = threading.Lock()
        self._places = threading.Semaphore(most)

    @contextmanager
    def borrow(self) -> Iterator[Fetch]:
        with self.lent() as worker:
            yield worker.read

    @contextmanager
    def lent(self) -> Iterator[Worker]:
        with self._places:
            with self._lock:
                if self._closed:
                    raise PassEnded("the loader was closed: its workers read no more samples")
                if not self._idle:
                    self._idle.append(self._make(len(self._all)))
                    self._all += self._idle
                worker = self._idle.pop()
            try:
                yield worker
            finally:
                with self._lock:
                    self._idle.append(worker)

    def fill(self) -> list[Worker]:
        """Make the workers that are still missing; returns all of them."""
        with self._lock:
            if self._closed:
                raise PassEnded("the loader was closed: its workers read no more samples")
            while len(self._all) < self._most:
                made = self._make(len(self._all))
                self._all.append(made)
                self._idle.append(made)
            return [*self._all]

    def close(self) -> None:
        with self._lock:
            workers, self._all, self._idle, self._closed = self._all, [], [], True
        for worker in workers:
            worker.stop()  # all are told first, so that they end at the same time
        for worker in workers:
            worker.close()
