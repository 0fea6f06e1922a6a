"""What is decoded in one pass, in which order, and how far that has come.

PassOrder       the samples of the pass; PassProgress: what reading made of them
PassJobs        which positions are to be read, in which order
DecodeWork      given by the caller, never changed: how to read samples, and make a batch of them
WorkProgress    kept by the prefetcher under its lock: what is taken, where it lies, what is ready

All of them hold what is in the buffer, and nothing for each sample of the pass.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaders.order.keyed_permutation import SourceOrder
from loaders.order.serve import Residents, Serve

Done = Callable[..., None]
"""`done(*positions)`: these samples are in their slots."""
Read = Callable[[Sequence[int], Sequence[int], Done], None]
Make = Callable[[int, Serve, NDArray[np.int64]], Any]
Rows = Callable[[NDArray[np.int64]], NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class PassJobs:
    """The positions that are to be read, ascending: some of the buffer, and all that follow it."""

    residents: NDArray[np.int64]
    may_follow: range
    end: Callable[[], int | None] = lambda: None
    """Where the pass ends, if that is found out only while it is read."""

    @property
    def following(self) -> range:
        end = self.end()
        return self.may_follow if end is None else range(self.may_follow.start, end)

    @classmethod
    def whole_pass(cls, samples: int) -> "PassJobs":
        return cls(np.zeros(0, dtype=np.int64), range(samples))

    @classmethod
    def from_residents(cls, residents: Residents, samples: int) -> "PassJobs":
        """What a pass of `samples` samples still has to read where it is entered."""
        return cls(residents.positions, range(residents.entered, samples))

    def __len__(self) -> int:
        return len(self.residents) + len(self.following)

    def some(self, begin: int, count: int) -> list[int]:
        """`count` of them from number `begin` on, or as many as there are."""
        there = len(self.residents)
        of_those = self.residents[begin : begin + count].tolist()
        first = max(begin - there, 0)
        return [*of_those, *self.following[first : max(begin + count - there, 0)]]

    def up_to(self, position: int) -> int:
        """So many of them are no later than `position`."""
        of_those = int(np.searchsorted(self.residents, position, side="right"))
        behind = min(position + 1, self.following.stop) - self.following.start
        return of_those + max(behind, 0)


@dataclass(frozen=True, slots=True, eq=False)
class DecodeWork:
    """The decoding of one pass."""

    jobs: PassJobs
    read: Read
    """`read(positions, slots, done)` reads samples into slots, and calls `done(position)` as soon
    as one of them is in its slot. Workers call it, several at the same time."""
    make: Make
    """`make(index, serve, slots)` makes a batch of decoded samples. It is called like `read`."""
    reuse: int
    decoded_rows: Rows | None = None
    """The rows of positions, where the samples lie decoded in the data set's own memory: then
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
    slot_of: dict[int, int] = field(default_factory=dict[int, int])
    """Where the positions lie that have a slot."""
    ready: set[int] = field(default_factory=set[int])
    """Those of them that were read."""

    def __post_init__(self) -> None:
        if self.work.decoded_rows is not None:
            self.taken = len(self.work.jobs)

    @property
    def all_taken(self) -> bool:
        return self.taken >= len(self.work.jobs)

    def has(self, positions: NDArray[np.int64]) -> bool:
        """Whether all of them can be served."""
        return self.work.decoded_rows is not None or self.ready.issuperset(positions.tolist())

    def slots(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.work.decoded_rows is not None:
            return self.work.decoded_rows(positions)
        return np.array([self.slot_of[p] for p in positions.tolist()], dtype=np.int64)

    def take(self, count: int, free: list[int]) -> tuple[list[int], list[int]]:
        """Take the next jobs, and a free slot for each; returns both."""
        positions = self.work.jobs.some(self.taken, count)
        slots = [free.pop() for _ in positions]
        self.taken += len(positions)
        self.slot_of.update(zip(positions, slots, strict=True))
        return positions, slots

    def release(self, positions: Iterable[int]) -> list[int]:
        """Take their slots from `positions`; returns the slots that fall free by it."""
        positions = [p for p in positions if p in self.slot_of]
        self.ready.difference_update(positions)
        return [self.slot_of.pop(p) for p in positions]


# What is drawn has a number in the keys of random numbers: that of its serve, or one of these. They
# differ while a sample is drawn, and a drawing served, less than 2^20 times in a pass.
DRAWN_AGAIN = 1 << 20
"""It lies between the serves of a sample and those of its next drawing in the same pass."""
ONCE = 1 << 40
"""For an augmentation that is drawn once a pass."""
READING = 1 << 41
"""For reading that draws random numbers."""
WORKER_SEED = 1 << 42
"""For the seed of a DataLoader's workers."""


@dataclass(slots=True, eq=False)
class PassProgress:
    """What the reader found so far at the positions of a pass that differ from the rule."""

    replaced: dict[int, int] = field(default_factory=dict[int, int])
    """The samples that replace unreadable ones, by their positions."""
    cached: set[int] = field(default_factory=set[int])
    """The positions whose samples came from the decoded cache, until they are counted."""
    decoded: int = 0
    """This many samples were decoded."""


@dataclass(frozen=True, slots=True, eq=False)
class PassOrder:
    """The samples of one pass, as they were drawn."""

    pass_index: int
    drawn_ids: SourceOrder | NDArray[np.int64]
    """The sample that each position has. A sampler draws all of them at once."""
    again: NDArray[np.int64] | None = None
    """How often a sampler drew each position's id earlier in this pass. None: no id comes twice."""
    drawn: str = ""
    """The digest of all ids that a sampler drew. Empty: there is no sampler."""
    progress: PassProgress = field(default_factory=PassProgress)
    fed: Callable[[Read], Read] | None = None
    """What reads the samples of a stream before they can be decoded."""

    def __len__(self) -> int:
        return len(self.drawn_ids)

    def ids(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples that positions serve: their own, or replacements for unreadable ones."""
        ids = self.drawn_ids[positions]
        if replaced := self.progress.replaced:
            pairs = zip(positions.tolist(), ids.tolist(), strict=True)
            ids = np.array([replaced.get(*pair) for pair in pairs], dtype=np.int64)
        return ids

    def strided(self, start: int, step: int) -> "PassOrder":
        """Every `step`-th position from `start` on, with a progress of its own."""
        mine = slice(start, None, step)
        again = None if self.again is None else self.again[mine]
        return PassOrder(self.pass_index, self.drawn_ids[mine], again, self.drawn)

    def count_cached(self, positions: NDArray[np.int64]) -> int:
        """How many of these came from the cache. They are not counted again."""
        counted = self.progress.cached.intersection(positions.tolist())
        self.progress.cached -= counted
        return len(counted)

    def draws(self, positions: NDArray[np.int64], serves: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number that stands for the serve in the keys of random numbers. It differs where a
        sample is drawn twice in a pass, so that both are augmented differently."""
        return serves if self.again is None else serves + self.again[positions] * DRAWN_AGAIN
