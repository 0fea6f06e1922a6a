"""Which samples a lane serves at each step of a pass. Pure.

    order of the pass   6 2 9 4 0 7 1 8        of (seed, pass); nobody's rank is in it
    lane 0 of 3         6     4     1          every third id of it: no id twice, none left out

Step k serves batch k of every lane's ReuseBuffer, which is seeded by (seed, pass, lane). At the
last steps of a pass some lanes may have a smaller batch, or none. With `drop_last` the pass ends
where the shortest lane ends.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from loaders.order.reuse import ReuseBuffer
from loaders.order.serve import EMPTY, BufferAges, Serve

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
    """One pass, which is shared out to `lanes` lanes."""

    whole: ReuseBuffer
    """The pass over all samples. Its batches are those of one lane."""
    lanes: int
    reaugment: bool
    """Whether every serve of a sample draws anew."""
    steps_limit: int | None
    """The pass ends after this many steps. None: it is served whole."""

    def __len__(self) -> int:
        """The number of steps."""
        whole = len(self.plan(self.lanes - 1 if self.whole.drop_last else 0))
        return whole if self.steps_limit is None else min(whole, self.steps_limit)

    @property
    def slots(self) -> int:
        """So many samples of a lane are in memory at most: those of its reuse buffer, and a batch
        more. The samples that a step serves for the last time stay until the step is committed."""
        return self.whole.capacity + self.whole.batch_size

    def share(self, lane: int) -> int:
        """The number of samples of a lane."""
        return (self.whole.samples - lane + self.lanes - 1) // self.lanes

    def sizes(self, step: int) -> tuple[int, ...]:
        """For each lane the number of samples that it serves at this step."""
        return tuple(self.size(lane, step) for lane in range(self.lanes))

    def size(self, lane: int, step: int) -> int:
        plan = self.plan(lane)
        if step >= len(plan):
            return 0
        if plan.mode == "immediate":
            left = plan.samples - step // plan.reuse * plan.batch_size
        else:
            left = plan.samples * plan.reuse - step * plan.batch_size
        return min(left, plan.batch_size)

    def plan(self, lane: int) -> ReuseBuffer:
        """The reuse order of a lane. Its positions count the samples of the lane's share."""
        return replace(self.whole, samples=self.share(lane), seed=(*self.whole.seed[:-1], lane))


@dataclass(slots=True, eq=False)
class LaneWalk:
    """A lane's reuse order, walked step by step. It may be entered anywhere."""

    plan: ReuseBuffer
    step: int = 0
    """The first step that was not walked yet."""
    _ages: BufferAges = field(init=False)
    _serves: Iterator[Serve] = field(init=False)
    _recent: dict[int, tuple[Serve, int]] = field(init=False)
    """What recent steps serve, and how old it is."""

    def __post_init__(self) -> None:
        self._enter(self.step)

    def reaches(self, step: int) -> bool:
        """Whether this walk can serve `step`: nobody walks back further than a step."""
        return step >= self.step or step in self._recent

    def serve(self, step: int) -> Serve:
        """What the lane serves at `step`; it is empty when the lane has nothing left."""
        if step >= self.step + RECENT:
            self._enter(step + 1 - RECENT)
        while self.step <= step:
            self._walk()
        return self._recent[step][0]

    def ages(self, step: int) -> int:
        """The sum of the ages of what the lane serves at a step that was walked."""
        return self._recent[step][1]

    def _enter(self, step: int) -> None:
        residents, self._serves = self.plan.walk(step)
        self._ages = BufferAges.at_entry(residents, self.plan.reuse)
        self.step, self._recent = step, {}

    def _walk(self) -> None:
        serve = next(self._serves, EMPTY)
        ages = self._ages.count(self.step, serve.positions, serve.serves)
        self._recent[self.step] = serve, ages
        self._recent.pop(self.step - RECENT, None)
        self.step += 1
