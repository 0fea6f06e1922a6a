"""The only threads: decode samples ahead of their serve into free slots.

    jobs (positions in order) -> worker takes the next one once a slot is free -> decode -> ready
                                            ^                                               |
    release(positions) after the last serve |<------------- wait(positions) by the consumer <

Back-pressure is the free slots: no queue, nothing unbounded. Positions are taken in order, and the
reuse buffer never asks for one before all earlier ones had a slot, so waiting cannot deadlock.
A worker's failure reaches the consumer as the original exception, with a note which sample it was.
"""

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from loaders.errors import PassEnded

JOIN_SECONDS = 10.0
NO_SLOT = -1


class DecodePool:
    """Decodes `jobs` in order, `workers` at a time, into `slots` slots. Use it as a context."""

    def __init__(
        self,
        decode: Callable[[int, int], None],
        jobs: Sequence[int],
        *,
        slots: int,
        workers: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`decode(position, slot)` runs on worker threads, one call a position."""
        self._decode = decode
        self._jobs = jobs
        self._clock = clock
        self._next = 0
        self._free = list(range(slots - 1, -1, -1))
        self._slot_of = np.full(max(jobs, default=-1) + 1, NO_SLOT, dtype=np.int64)
        self._ready = np.zeros(len(self._slot_of), dtype=bool)
        self._error: BaseException | None = None
        self._stopping = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, name=f"perfect-decode-{n}", daemon=True)
            for n in range(workers)
        ]
        self.decoded = 0
        self.stall_seconds = 0.0

    def __enter__(self) -> "DecodePool":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The slots of `positions`, once all of them are decoded. Called by the consumer."""
        with self._changed:
            if not self._answerable(positions):
                started = self._clock()
                self._changed.wait_for(lambda: self._answerable(positions))
                self.stall_seconds += self._clock() - started
            if self._error:
                raise self._error
            if self._stopping:
                raise PassEnded(
                    "this pass has ended: the loader began another one; use one iterator at a time"
                )
            return self._slot_of[positions]

    def release(self, positions: NDArray[np.int64]) -> None:
        """`positions` were served for the last time: their slots are free. Called by the
        consumer."""
        if len(positions):
            with self._changed:
                self._free += self._slot_of[positions].tolist()
                self._changed.notify_all()

    def close(self) -> None:
        """Stop and join the workers; safe to call again."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(JOIN_SECONDS)

    def _work(self) -> None:
        while (job := self._take()) is not None:
            position, slot = job
            try:
                self._decode(position, slot)
            except BaseException as error:
                with self._changed:
                    self._error = self._error or error
                    self._changed.notify_all()
                return
            with self._changed:
                self._ready[position] = True
                self.decoded += 1
                self._changed.notify_all()

    def _take(self) -> tuple[int, int] | None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopping or self._error or self._done or self._free
            )
            if self._stopping or self._error or self._done:
                return None
            position, slot = int(self._jobs[self._next]), self._free.pop()
            self._next += 1
            self._slot_of[position] = slot
            return position, slot

    def _answerable(self, positions: NDArray[np.int64]) -> bool:
        return self._stopping or self._error is not None or bool(self._ready[positions].all())

    @property
    def _done(self) -> bool:
        return self._next == len(self._jobs)
