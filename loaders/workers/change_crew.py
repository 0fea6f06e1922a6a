"""Threads that have samples changed by worker processes, several at once for one batch.

    batch of 128 -> parts of a few samples -> whichever process is idle -> the samples, in order

What changes them (a user's function) is pickled once. The threads only wait for the processes.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from loaders.slots.leaves import Sample, own
from loaders.workers.processes import WorkerProcess
from loaders.workers.worker_pool import WorkerPool

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

    def changed(
        self, change: bytes, samples: Sequence[Sample], ids: Sequence[int], keys: Sequence[int]
    ) -> list[Sample]:
        """The samples, changed by the pickled function `change`. The first error in the order of
        the samples is raised."""
        size = max(1, len(ids) // (PARTS * self._workers))
        cuts = [slice(first, first + size) for first in range(0, len(ids), size)]
        parts = [
            self._pool.submit(self._part, change, samples[cut], ids[cut], keys[cut]) for cut in cuts
        ]
        return [sample for part in parts for sample in part.result()]

    def run_off_crew(self, job: Callable[[], object]) -> bool:
        """If this thread is one of the crew, run `job` on a new thread; returns whether it did. The
        garbage collector may close a loader on any thread."""
        if threading.get_ident() not in self._threads:
            return False
        threading.Thread(target=job, name="perfect-change-end", daemon=True).start()
        return True

    def close(self) -> None:
        """Begin no further part. The processes are ended by whoever owns them."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _part(
        self, change: bytes, samples: Sequence[Sample], ids: Sequence[int], keys: Sequence[int]
    ) -> list[Sample]:
        with self._processes.lent() as process:
            chunk = process.change(change, samples, ids, keys)
            made = [own(sample) for sample in chunk.samples]
        if chunk.error is not None:
            chunk.error.add_note(f"while augmenting sample {ids[len(made)]}")
            raise chunk.error
        return made
