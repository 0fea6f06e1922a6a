"""As many workers as threads read at once, each lent to one thread at a time.

A worker is a process, or a thread that may be left behind. A `ChangeCrew` has samples changed:

    batch of 128 -> parts of a few samples -> whichever process is idle -> the samples, in order
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Generic, TypeVar

from loaders.errors import PassEnded
from loaders.slots.leaves import Fetch, Sample, copy_sample
from loaders.workers.processes import WorkerProcess
from loaders.workers.reading_thread import ReadingThread

Worker = TypeVar("Worker", WorkerProcess, ReadingThread)


class WorkerPool(Generic[Worker]):
    """At most `most` workers, made when they are needed, each lent for a chunk."""

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


Readers = WorkerPool[WorkerProcess] | WorkerPool[ReadingThread]

PARTS = 4
"""A batch is cut into so many parts for each worker, so that none waits long for the slowest."""


class ChangeCrew:
    """As many threads as there are worker processes. They start when they are needed."""

    def __init__(self, processes: WorkerPool[WorkerProcess], workers: int) -> None:
        self._processes = processes
        self._workers = workers
        threads = self._threads = set[int]()
        self._pool = ThreadPoolExecutor(
            workers, "perfect-change", lambda: threads.add(threading.get_ident())
        )

    def start_processes(self) -> None:
        """Start those that are missing, if that is done by forking."""
        for process in self._processes.fill():
            process.start()

    def changed(
        self, change: bytes, samples: Sequence[Sample], ids: Sequence[int], keys: Sequence[int]
    ) -> list[Sample]:
        """The samples, changed by the pickled function `change`, or their first error."""
        size = max(1, len(ids) // (PARTS * self._workers))
        cuts = [slice(first, first + size) for first in range(0, len(ids), size)]
        parts = [
            self._pool.submit(self._part, change, samples[cut], ids[cut], keys[cut]) for cut in cuts
        ]
        return [sample for part in parts for sample in part.result()]

    def is_worker(self) -> bool:
        """Whether the calling thread is one of the crew."""
        return threading.get_ident() in self._threads

    def close(self) -> None:
        """Begin no further part. The processes are ended by whoever owns them."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _part(
        self, change: bytes, samples: Sequence[Sample], ids: Sequence[int], keys: Sequence[int]
    ) -> list[Sample]:
        with self._processes.lent() as process:
            chunk = process.change(change, samples, ids, keys)
            made = [copy_sample(sample) for sample in chunk.samples]
        if chunk.error is not None:
            chunk.error.add_note(f"while augmenting sample {ids[len(made)]}")
            raise chunk.error
        return made
