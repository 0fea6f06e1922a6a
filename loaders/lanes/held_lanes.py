"""What is decoded of the lanes that this peer holds: their samples, slots and planned batches.

    HeldLane   lane 5 --- LaneRoom        its slots, kept from pass to pass
                      '-- LaneProgress    of the pass that is served
                      '-- LaneProgress    of the next pass, decoded ahead where slots are free

A step that is not committed may be asked for again. So the samples that it serves for the last time
keep their slots until the step is committed (`retire`). The lock of the crew protects all of this.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from loaders.batches import BatchMaker, Gathered
from loaders.lanes.lane_order import LanePass, LaneWalk, last_serves
from loaders.order.serve import Residents, Serve
from loaders.slots.slab import Slab
from loaders.workers.decode_work import PassJobs, Rows
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
    jobs: PassJobs | None = None
    """The positions that are read. None: nobody has walked to the present step."""
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
    slot_of: dict[int, int] = field(default_factory=dict[int, int])
    """Where the positions lie that have a slot."""
    ready: set[int] = field(default_factory=set[int])
    """Those of them that were read."""
    unwanted: set[int] = field(default_factory=set[int])
    """Those of them that are being read, though they are not served any more."""
    residents: Residents | None = None
    """Who stood in the buffer where the lane was last entered."""
    decoded_rows: Rows | None = None
    """The rows of positions, where all samples lie decoded in the data set's own memory."""

    @property
    def all_taken(self) -> bool:
        return self.jobs is not None and self.taken == len(self.jobs)

    def lies_decoded(self, rows: Rows) -> None:
        """Note that all samples lie decoded in these rows of the data set's own memory."""
        self.jobs, self.decoded_rows = PassJobs.all(0), rows

    def may_make(self, step: int) -> bool:
        """Whether all samples of the batch of this step are there."""
        serve = self.planned.get(step)
        if serve is None:
            return False
        return self.decoded_rows is not None or self.ready.issuperset(serve.positions.tolist())

    def slots(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.decoded_rows is not None:
            return self.decoded_rows(positions)
        return np.array([self.slot_of[p] for p in positions.tolist()], dtype=np.int64)

    def lacks(self, step: int) -> bool:
        """Whether samples of the batch of this step are not even being read."""
        return self.taken < self.needed.get(step, 0)

    def note_plan(self, step: int, serve: Serve, residents: Residents | None) -> list[int]:
        """Note what is served at `step`. `residents` says who stands in the buffer before it, if
        steps were left out; returns the slots that fall free by it."""
        free: list[int] = []
        if residents is not None and self.decoded_rows is None:
            self.residents = residents
            if self.jobs is None:
                self.jobs = PassJobs.after(residents, len(self.order))
            else:
                free = self._let_go([p for p in self.slot_of if self._left_out(p)])
        assert self.jobs is not None
        self.planned[step] = serve
        self.needed[step] = self.jobs.up_to(int(serve.positions.max(initial=-1)))
        return free

    def _left_out(self, position: int) -> bool:
        """Whether a position was served to its end by steps that were left out here."""
        there = self.residents
        if there is None or position >= there.entered:
            return False
        at = int(np.searchsorted(there.positions, position))
        return at == len(there.positions) or there.positions[at] != position

    def next_jobs(self, count: int, free: list[int]) -> list[int]:
        """Take up to `count` positions that are to be read next, and a free slot for each."""
        assert self.jobs is not None
        found: list[int] = []
        while len(found) < count and not self.all_taken:
            (position,) = self.jobs.some(self.taken, 1)
            self.taken += 1
            if not self._left_out(position):
                found.append(position)
        self.slot_of.update((position, free.pop()) for position in found)
        return found

    def end_read(self, positions: list[int]) -> list[int]:
        """Note that nobody reads these positions any more; returns the slots that fall free."""
        useless = [p for p in positions if p not in self.ready or p in self.unwanted]
        self.unwanted.difference_update(positions)
        return self._taken_back(useless)

    def retire(self, step: int) -> list[int]:
        """Forget the steps before `step`, which are committed; returns the slots that fall free."""
        free: list[int] = []
        for old in [s for s in self.planned if s < step and s not in self.making]:
            serve = self.planned.pop(old)
            self.needed.pop(old)
            self.made.pop(old, None)
            free += self._let_go(last_serves(serve, self.of.reuse).tolist())
        return free

    def all_slots(self) -> list[int]:
        """Take the slots from all samples."""
        if self.decoded_rows is None:
            self.made.clear()
        return self._taken_back([*self.slot_of])

    def _let_go(self, positions: Sequence[int]) -> list[int]:
        """These samples are not served any more. Those that are being read keep their slots until
        they were read."""
        self.unwanted.update(p for p in positions if p in self.slot_of and p not in self.ready)
        return self._taken_back([p for p in positions if p in self.ready])

    def _taken_back(self, positions: Sequence[int]) -> list[int]:
        self.ready.difference_update(positions)
        return [self.slot_of.pop(p) for p in positions if p in self.slot_of]


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
