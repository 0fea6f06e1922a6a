"""What a prefetcher decodes for one pass, and how far it has come with it.

DecodeWork      given by the caller, never changed: which samples, how to read them, how to make
                a batch of them
WorkProgress    kept by the prefetcher under its lock: which samples are taken, in which slots
                they lie, which of them are ready
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaders.order.reuse import Serve

NO_SLOT = -1

Done = Callable[[int], None]
Read = Callable[[Sequence[int], Sequence[int], Done], None]
Make = Callable[[int, Serve, NDArray[np.int64]], Any]


@dataclass(frozen=True, slots=True, eq=False)
class DecodeWork:
    """The decoding of one pass: the positions `jobs` are read in this order."""

    jobs: NDArray[np.int64]
    read: Read
    """`read(positions, slots, done)` reads samples into slots, and calls `done(position)` as soon
    as one of them is in its slot. Workers call it, several at the same time."""
    make: Make
    """`make(index, serve, slots)` makes a batch of decoded samples. It is called like `read`."""
    reuse: int
    decoded_rows: NDArray[np.int64] | None = None
    """The row of each position, where the samples lie decoded in the data set's own memory: then
    nothing is read, and no slot falls free."""


@dataclass(slots=True, eq=False)
class WorkProgress:
    """How far the decoding of one pass has come."""

    work: DecodeWork
    taken: int = 0
    """This many of the jobs were taken by workers."""
    busy: int = 0
    """This many workers are reading now."""
    error: BaseException | None = None
    slot_of: NDArray[np.int64] = field(init=False)
    ready: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        positions = int(self.work.jobs.max(initial=-1)) + 1
        self.slot_of = np.full(positions, NO_SLOT, dtype=np.int64)
        self.ready = np.zeros(positions, dtype=bool)
        if self.work.decoded_rows is not None:
            self.taken = len(self.work.jobs)
            self.slot_of[:] = self.work.decoded_rows
            self.ready[:] = True

    @property
    def all_taken(self) -> bool:
        return self.taken == len(self.work.jobs)

    def release(self, positions: NDArray[np.int64]) -> list[int]:
        """Take their slots from `positions`; returns the slots that fall free by it."""
        if self.work.decoded_rows is not None:
            return []
        slots = self.slot_of[positions].tolist()
        self.slot_of[positions] = NO_SLOT
        return slots
