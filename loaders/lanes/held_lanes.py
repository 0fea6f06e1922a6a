"""What is decoded of the lanes that this peer holds: their samples, slots and planned batches.

    HeldLane   lane 5 --- LaneRoom        its slots, kept from pass to pass
                      '-- LaneProgress    of the pass that is served
                      '-- LaneProgress    of the next pass, decoded ahead where slots are free

A step that is not committed may be asked for again. So the samples that it serves for the last time
keep their slots until the step is committed (`retire`). The lock of the crew protects all of this.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from loaders.batches import BatchMaker, Gathered
from loaders.lanes.lane_order import LanePass, LaneWalk, last_serves
from loaders.order.reuse import Serve
from loaders.slots.slab import Slab
from loaders.workers.decode_work import NO_SLOT
from loaders.workers.pass_order import PassOrder


@dataclass(slots=True, eq=False)
class LaneRoom:
    """The slots of one lane, and what makes batches of the samples in them."""

    slab: Slab
    maker: BatchMaker
    free: list[int]


@dataclass(slots=True, eq=False)
class LaneProgress:
    """How far one lane has come in one pass."""

    of: LanePass
    order: PassOrder
    """The lane's share of the order of the pass."""
    walk: LaneWalk
    jobs: NDArray[np.int64] | None = None
    """The positions that are read, in this order. None: nobody has walked to the present step."""
    taken: int = 0
    """This many of the jobs were taken by threads."""
    busy: int = 0
    """This many threads read, plan or make something of it."""
    planning: bool = False
    left: bool = False
    """Whether nobody serves it any more."""
    error: BaseException | None = None
    taken_step: int = -1
    """The latest step whose batch the consumer has taken."""
    counted_step: int = -1
    """The latest step whose batch was counted."""
    served_fresh: int = 0
    """This many samples that were decoded here were served for the first time."""
    planned: dict[int, Serve] = field(default_factory=dict[int, Serve])
    needed: dict[int, int] = field(default_factory=dict[int, int])
    """So many of the jobs have to be read for the batch of each planned step."""
    making: set[int] = field(default_factory=set[int])
    made: dict[int, Gathered | BaseException] = field(
        default_factory=dict[int, Gathered | BaseException]
    )
    """Batches that were made ahead, by their steps."""
    slot_of: NDArray[np.int64] = field(init=False)
    ready: NDArray[np.bool_] = field(init=False)
    gone: NDArray[np.bool_] = field(init=False)
    """Which samples are not served any more."""

    def __post_init__(self) -> None:
        samples = len(self.order.ids)
        self.slot_of = np.full(samples, NO_SLOT, dtype=np.int64)
        self.ready = np.zeros(samples, dtype=bool)
        self.gone = np.zeros(samples, dtype=bool)

    @property
    def all_taken(self) -> bool:
        return self.jobs is not None and self.taken == len(self.jobs)

    def lies_decoded(self, rows: NDArray[np.int64]) -> None:
        """Note that all samples lie decoded in these rows of the data set's own memory."""
        self.jobs = np.zeros(0, dtype=np.int64)
        self.slot_of = rows
        self.ready[:] = True

    def may_make(self, step: int) -> bool:
        """Whether all samples of the batch of this step are there."""
        serve = self.planned.get(step)
        return serve is not None and bool(self.ready[serve.positions].all())

    def lacks(self, step: int) -> bool:
        """Whether samples of the batch of this step are not even being read."""
        return self.taken < self.needed.get(step, 0)

    def note_plan(self, step: int, serve: Serve, before: NDArray[np.int64] | None) -> list[int]:
        """Note what is served at `step`. `before` says how often each sample was served before, if
        steps were left out; returns the slots that fall free by it."""
        free: list[int] = []
        if self.jobs is None:
            assert before is not None
            self.jobs = np.flatnonzero(before < self.of.reuse)
            self.gone = before >= self.of.reuse
        elif before is not None:
            free = self._let_go(np.flatnonzero((before >= self.of.reuse) & ~self.gone))
        self.planned[step] = serve
        last = serve.positions.max(initial=-1)
        self.needed[step] = int(np.searchsorted(self.jobs, last, side="right"))
        return free

    def next_jobs(self, count: int) -> list[int]:
        """Take up to `count` positions that are to be read next."""
        assert self.jobs is not None
        found: list[int] = []
        while len(found) < count and self.taken < len(self.jobs):
            position = int(self.jobs[self.taken])
            self.taken += 1
            if not self.gone[position]:
                found.append(position)
        return found

    def end_read(self, positions: list[int]) -> list[int]:
        """Note that nobody reads these positions any more; returns the slots that fall free."""
        which = np.array(positions, dtype=np.int64)
        return self._taken_back(which[~self.ready[which] | self.gone[which]])

    def retire(self, step: int) -> list[int]:
        """Forget the steps before `step`, which are committed; returns the slots that fall free."""
        free: list[int] = []
        for old in [s for s in self.planned if s < step and s not in self.making]:
            serve = self.planned.pop(old)
            self.needed.pop(old)
            self.made.pop(old, None)
            if self.jobs is not None and len(self.jobs):
                free += self._let_go(last_serves(serve, self.of.reuse))
        return free

    def all_slots(self) -> list[int]:
        """Take the slots from all samples."""
        if self.jobs is not None and not len(self.jobs):
            return []
        self.made.clear()
        return self._taken_back(np.arange(len(self.slot_of)))

    def _let_go(self, positions: NDArray[np.int64]) -> list[int]:
        """These samples are not served any more. Those that are being read keep their slots until
        they were read."""
        self.gone[positions] = True
        return self._taken_back(positions[self.ready[positions]])

    def _taken_back(self, positions: NDArray[np.int64]) -> list[int]:
        slots = self.slot_of[positions]
        self.slot_of[positions] = NO_SLOT
        self.ready[positions] = False
        return slots[slots != NO_SLOT].tolist()


@dataclass(slots=True, eq=False)
class HeldLane:
    """A lane that this peer serves."""

    lane: int
    now: LaneProgress
    coming: LaneProgress | None = None
    """Of the next pass: what is decoded of it while this one drains."""
    room: LaneRoom | None = None
    """None: nobody has made room for its samples yet."""
    left: bool = False
    """Whether it was let go."""

    @property
    def busy(self) -> int:
        return self.now.busy + (0 if self.coming is None else self.coming.busy)
