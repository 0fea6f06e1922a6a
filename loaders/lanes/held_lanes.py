"""What is decoded of the lanes that this peer holds, and what a thread does next for them.

    HeldLane   lane 5 --- LaneRoom        its slots, kept from pass to pass
                      '-- LaneProgress    of the pass that is served, and of the next pass
                            '-- LaneStep  a planned step, until it is committed

    make    a batch whose samples are all there, up to `ahead` batches before they are asked for
    plan    walk a lane's order to this step, and to the one after it
    read    samples: first for the lane that is waited for, then for batches of this step, then for
            those of the next one, then wherever most slots are free

A step that is not committed may be asked for again, so samples keep their slots until then
(`retire`). Nothing is made for the next step while a batch of this step might be. The lock of the
crew protects all of this.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from loaders.batching.batches import BatchMaker, Gathered
from loaders.lanes.lane_order import LanePass, LaneWalk
from loaders.order.serve import Residents, Serve
from loaders.slots.slab import Slab
from loaders.workers.decode_work import PassJobs, PassOrder, WorkProgress


@dataclass(slots=True, eq=False)
class LaneRoom:
    """The slots of one lane, and what makes batches of the samples in them."""

    slab: Slab
    maker: BatchMaker
    free: list[int]


@dataclass(slots=True, eq=False)
class LaneStep:
    """A planned step of one lane, until it is committed."""

    serve: Serve
    jobs_needed: int
    """So many of the pass's jobs have to be read for its batch."""
    is_being_made: bool = False
    made: Gathered | BaseException | None = None
    """The batch that was made ahead, or the error that it raised."""
    taken: bool = False
    """Whether the consumer has taken the batch."""
    counted: bool = False

    @property
    def is_open(self) -> bool:
        """Whether a thread may begin to make the batch: none is at it, and it does not lie ready.
        A batch that was taken may be made again."""
        return self.made is None and not self.is_being_made


@dataclass(slots=True, eq=False)
class LaneProgress:
    """How far one lane has come in one pass."""

    of: LanePass
    order: PassOrder
    """The lane's share of the order of the pass."""
    walk: LaneWalk
    samples: WorkProgress
    """Which of its samples are read, and where they lie."""
    next_step: int | None = None
    """The first step that is not planned. None: nobody has entered the lane in this pass."""
    steps: dict[int, LaneStep] = field(default_factory=dict[int, LaneStep])
    """Those that are planned and not committed."""
    busy: int = 0
    """This many threads read, plan or make something of it."""
    planning: bool = False
    left: bool = False
    """Whether nobody serves it any more."""
    error: BaseException | None = None
    served_fresh: int = 0
    """This many samples that were decoded here were served for the first time."""
    gone: set[int] = field(default_factory=set[int])
    """Positions that were not read yet when their last serve was committed."""

    @property
    def all_taken(self) -> bool:
        """Whether threads have begun to read all of its samples."""
        return self.next_step is not None and self.samples.all_taken

    @property
    def may_read(self) -> bool:
        return self.next_step is not None and not self.samples.all_taken and self.error is None

    def may_make(self, step: int) -> bool:
        """Whether a thread may begin to make the batch of this step, and its samples are there."""
        planned = self.steps.get(step)
        return planned is not None and planned.is_open and self.samples.has(planned.serve.positions)

    def is_pending(self, step: int) -> bool:
        """Whether the batch of this step was never taken, and a thread has still to make it."""
        planned = self.steps.get(step)
        return planned is None or (planned.is_open and not planned.taken)

    def lacks(self, step: int) -> bool:
        """Whether samples of the batch of this step are not even being read."""
        planned = self.steps.get(step)
        return planned is not None and self.samples.taken < planned.jobs_needed

    def note_plan(self, step: int, serve: Serve, residents: Residents | None) -> None:
        """Note what is served at `step`, which is the next one. `residents` says who stands in the
        buffer before it, where the lane is entered there."""
        work = self.samples.work
        if residents is not None and work.decoded_rows is None:
            jobs = PassJobs.from_residents(residents, len(self.order))
            self.samples.work = replace(work, jobs=jobs)
        jobs_needed = self.samples.work.jobs.up_to(int(serve.positions.max(initial=-1)))
        self.steps[step], self.next_step = LaneStep(serve, jobs_needed), step + 1

    def take(self, step: int) -> Gathered | BaseException | None:
        """Take the batch of this step, if it is made."""
        planned = self.steps.get(step)
        if planned is None or planned.made is None:
            return None
        made, planned.made, planned.taken = planned.made, None, True
        return made

    def count_fresh(self, step: int, first_serves: NDArray[np.int64]) -> int | None:
        """Count the samples that were served for the first time at this step, once. Returns how
        many of them came from the cache. None: they were counted before."""
        planned = self.steps[step]
        if planned.counted:
            return None
        planned.counted = True
        cached = self.order.count_cached(first_serves)
        self.served_fresh += len(first_serves) - cached
        return cached

    def begin_reads(self, count: int, free: list[int]) -> list[int]:
        """Take up to `count` positions that are to be read next, and from `free` a slot for each.
        Slots of those that nobody needs any more go back to `free`."""
        positions, _ = self.samples.take(count, free)
        free += self.end_reads([p for p in positions if p in self.gone])
        return [p for p in positions if p in self.samples.slot_of]

    def end_reads(self, positions: Sequence[int]) -> list[int]:
        """Note that nobody reads these positions any more; returns the slots that fall free."""
        useless = [p for p in positions if p not in self.samples.ready or p in self.gone]
        self.gone.difference_update(positions)
        return self.samples.release(useless)

    def retire(self, step: int) -> list[int]:
        """Forget the steps before `step`, which are committed; returns the slots that fall free."""
        free: list[int] = []
        over = [n for n, each in self.steps.items() if n < step and not each.is_being_made]
        for serve in [self.steps.pop(number).serve for number in over]:
            served = serve.positions[serve.serves == self.of.whole.reuse - 1].tolist()
            if self.samples.work.decoded_rows is None:
                self.gone.update(p for p in served if p not in self.samples.ready)
                free += self.samples.release([p for p in served if p in self.samples.ready])
        return free


@dataclass(slots=True, eq=False)
class HeldLane:
    """A lane that this peer serves."""

    lane: int
    now: LaneProgress = field(init=False)
    coming: LaneProgress | None = None
    """Of the next pass: what is decoded of it while this one drains."""
    room: LaneRoom | None = None
    """None: nobody has made room for its samples yet."""
    left: bool = False
    """Whether it was let go."""

    @property
    def busy(self) -> int:
        return self.now.busy + (0 if self.coming is None else self.coming.busy)


# ---- what a thread does next --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class LaneJob:
    """Something that a thread does for a lane."""

    kind: Literal["make", "plan", "read"]
    held: HeldLane
    progress: LaneProgress
    step: int
    """Of the batch that is made or planned."""


def next_job(
    lanes: Sequence[HeldLane], step: int, waited_for: HeldLane | None, ahead: int
) -> LaneJob | None:
    return (
        _job_to_make_ahead(lanes, step, ahead)
        or next((job for held in lanes if (job := job_to_plan(held, step))), None)
        or _job_to_read(lanes, step, waited_for)
    )


def job_to_make(held: HeldLane, step: int) -> LaneJob | None:
    """The job that makes this lane's batch of this step, if that is possible now."""
    return LaneJob("make", held, held.now, step) if held.now.may_make(step) else None


def job_to_plan(held: HeldLane, step: int) -> LaneJob | None:
    """The job that walks this lane's order up to `step`, or one step further."""
    now = held.now
    following = step if now.next_step is None else now.next_step
    if now.planning or following >= min(step + 2, len(now.of)):
        return None
    return LaneJob("plan", held, now, following)


def _job_to_make_ahead(lanes: Sequence[HeldLane], step: int, ahead: int) -> LaneJob | None:
    if sum(not each.is_open for held in lanes for each in held.now.steps.values()) >= ahead:
        return None
    pending = [held for held in lanes if held.now.is_pending(step)]
    if job := _first_job_to_make(pending, step):
        return job
    steps = [held.now.steps.get(step) for held in pending]
    if any(planned is None or len(planned.serve.positions) for planned in steps):
        return None
    return _first_job_to_make(lanes, step + 1)


def _first_job_to_make(lanes: Iterable[HeldLane], step: int) -> LaneJob | None:
    for held in lanes:
        planned = held.now.steps.get(step)
        if planned and len(planned.serve.positions) and (job := job_to_make(held, step)):
            return job
    return None


def _job_to_read(
    lanes: Sequence[HeldLane], step: int, waited_for: HeldLane | None
) -> LaneJob | None:
    reads: list[tuple[int, int, LaneJob]] = []
    for held in lanes:
        room, now, coming = held.room, held.now, held.coming
        if room is None or not room.free:
            continue
        if now.may_read:
            urgency = 1 + now.lacks(step + 1) + 2 * now.lacks(step) + 4 * (held is waited_for)
            reads.append((urgency, len(room.free), LaneJob("read", held, now, step)))
        elif now.all_taken and coming is not None and coming.may_read and not now.error:
            reads.append((0, len(room.free), LaneJob("read", held, coming, 0)))
    return max(reads, key=lambda each: each[:2])[2] if reads else None
