"""Which samples a lane serves at each step of a pass. Pure.

    order of the pass   6 2 9 4 0 7 1 8        of (seed, pass); nobody's rank is in it
    lane 0 of 3         6     4     1          every third id of it: no id twice, none left out
    lane 1                2     0     8
    lane 2                  9     7

    step k of the pass  batch k of every lane's ReuseBuffer, which is seeded by (seed, pass, lane)

The shares differ by one sample at most. So some lanes may have a smaller batch, or none, at the
last steps of a pass. With `drop_last` the pass ends where the shortest lane ends.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from loaders.order.reuse import ORDER_STREAM, Mode, ReuseBuffer, Serve, batches_per_pass

RECENT = 2
"""A walk remembers the serves of this many steps: the present one, and one that is made ahead."""


@dataclass(frozen=True, slots=True)
class LaneServe:
    """What a lane serves at a step."""

    ids: NDArray[np.int64]
    """The numbers of the samples in the data set."""
    serves: NDArray[np.int64]
    """The number of each serve: 0 for a sample's first in the pass, 1 for its second, ..."""


@dataclass(frozen=True, slots=True)
class LanePass:
    """One pass over `samples` samples, which are shared out to `lanes` lanes."""

    pass_index: int
    samples: int
    lanes: int
    batch_size: int
    """The samples of one lane at one step."""
    reuse: int
    reaugment: bool
    """Whether every serve of a sample draws anew."""
    steps_limit: int | None
    """The pass ends after this many steps. None: it is served whole."""
    buffer_batches: int
    mode: Mode
    shuffle: bool
    drop_last: bool
    seed: int

    def __len__(self) -> int:
        """The number of steps."""
        whole = self._batches(self.lanes - 1 if self.drop_last else 0)
        return whole if self.steps_limit is None else min(whole, self.steps_limit)

    @property
    def slots(self) -> int:
        """So many samples of a lane are in memory at most: those of its reuse buffer, and a batch
        more. The samples that a step serves for the last time stay until the step is committed."""
        return (self.buffer_batches + 1) * self.batch_size

    def share(self, lane: int) -> int:
        """The number of samples of a lane."""
        return (self.samples - lane + self.lanes - 1) // self.lanes

    def sizes(self, step: int) -> tuple[int, ...]:
        """For each lane the number of samples that it serves at this step."""
        return tuple(self.size(lane, step) for lane in range(self.lanes))

    def size(self, lane: int, step: int) -> int:
        if step >= self._batches(lane):
            return 0
        if self.mode == "immediate":
            left = self.share(lane) - step // self.reuse * self.batch_size
        else:
            left = self.share(lane) * self.reuse - step * self.batch_size
        return min(left, self.batch_size)

    def plan(self, lane: int) -> ReuseBuffer:
        """The reuse order of a lane. Its positions count the samples of the lane's share."""
        return ReuseBuffer(
            samples=self.share(lane),
            batch_size=self.batch_size,
            reuse=self.reuse,
            buffer_batches=self.buffer_batches,
            mode=self.mode,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
            seed=(self.seed, ORDER_STREAM, self.pass_index, lane),
        )

    def _batches(self, lane: int) -> int:
        share = self.share(lane)
        return batches_per_pass(share, self.batch_size, self.reuse, self.mode, self.drop_last)


@dataclass(slots=True, eq=False)
class LaneWalk:
    """A lane's reuse order, walked step by step: what is alive in its buffer follows from it."""

    plan: ReuseBuffer
    step: int = 0
    """The first step that was not walked yet."""
    first_step: NDArray[np.int64] = field(init=False)
    """The step that served each sample first; -1: it was not served yet."""
    _served: NDArray[np.int64] = field(init=False)
    _serves: Iterator[Serve] = field(init=False)
    _recent: dict[int, Serve] = field(init=False)

    def __post_init__(self) -> None:
        self.first_step = np.full(self.plan.samples, -1, dtype=np.int64)
        self._served = np.zeros(self.plan.samples, dtype=np.int64)
        self._serves = iter(self.plan)
        self._recent = {}

    def reaches(self, step: int) -> bool:
        """Whether this walk can tell of `step`: nobody walks back further than a step."""
        return step >= self.step or step in self._recent

    def serve(self, step: int) -> Serve:
        """What the lane serves at `step`; it is empty when the lane has nothing left."""
        while self.step <= step:
            self._walk()
        return self._recent[step]

    def served_before(self, step: int) -> NDArray[np.int64]:
        """How often each sample was served before `step`."""
        self.serve(step)
        served = self._served.copy()
        for walked in range(self.step - 1, step - 1, -1):
            serve = self._recent[walked]
            # Backwards, because of a sample that a batch has twice the first serve counts.
            served[serve.positions[::-1]] = serve.serves[::-1]
        return served

    def _walk(self) -> None:
        serve = next(self._serves, None)
        if serve is None:
            serve = Serve(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
        self.first_step[serve.positions[serve.serves == 0]] = self.step
        self._served[serve.positions] = serve.serves + 1
        self._recent[self.step] = serve
        self._recent.pop(self.step - RECENT, None)
        self.step += 1


def last_serves(serve: Serve, reuse: int) -> NDArray[np.int64]:
    """The samples that are served here for the last time in their pass."""
    return serve.positions[serve.serves == reuse - 1]
