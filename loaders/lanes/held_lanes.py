"""What is decoded of the lanes that this peer holds, and what a thread does next for them.

    HeldLane   lane 5 --- LaneRoom        its slots, kept from pass to pass
                      '-- LaneProgress    of the pass that is served, and of the next pass

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
    gone: set[int] = field(default_factory=set[int])
    """Positions that were not read yet when their last serve was committed."""

    @property
    def jobs(self) -> PassJobs:
        return self.samples.work.jobs

    @property
    def all_taken(self) -> bool:
        """Whether threads have begun to read all of its samples."""
        return self.next_step is not None and self.samples.all_taken

    @property
    def may_read(self) -> bool:
        return self.next_step is not None and not self.samples.all_taken and self.error is None

    def may_make(self, step: int) -> bool:
        """Whether all samples of the batch of this step are there."""
        serve = self.planned.get(step)
        return serve is not None and self.samples.has(serve.positions)

    def lacks(self, step: int) -> bool:
        """Whether samples of the batch of this step are not even being read."""
        return self.samples.taken < self.needed.get(step, 0)

    def note_plan(self, step: int, serve: Serve, residents: Residents | None) -> None:
        """Note what is served at `step`, which is the next one. `residents` says who stands in the
        buffer before it, where the lane is entered there."""
        work = self.samples.work
        if residents is not None and work.decoded_rows is None:
            jobs = PassJobs.from_residents(residents, len(self.order))
            self.samples.work = replace(work, jobs=jobs)
        self.planned[step], self.next_step = serve, step + 1
        self.needed[step] = self.jobs.up_to(int(serve.positions.max(initial=-1)))

    def next_reads(self, count: int, free: list[int]) -> list[int]:
        """Take up to `count` positions that are to be read next, and a free slot for each."""
        positions, _ = self.samples.take(count, free)
        free += self.end_read([p for p in positions if p in self.gone])
        return [p for p in positions if p in self.samples.slot_of]

    def end_read(self, positions: Sequence[int]) -> list[int]:
        """Note that nobody reads these positions any more; returns the slots that fall free."""
        useless = [p for p in positions if p not in self.samples.ready or p in self.gone]
        self.gone.difference_update(positions)
        return self.samples.release(useless)

    def retire(self, step: int) -> list[int]:
        """Forget the steps before `step`, which are committed; returns the slots that fall free."""
        free: list[int] = []
        for old in [s for s in self.planned if s < step and s not in self.making]:
            serve = self.planned.pop(old)
            over = serve.positions[serve.serves == self.of.whole.reuse - 1].tolist()
            self.needed.pop(old)
            self.made.pop(old, None)
            if self.samples.work.decoded_rows is None:
                self.gone.update(p for p in over if p not in self.samples.ready)
                free += self.samples.release([p for p in over if p in self.samples.ready])
        return free

    def all_slots(self) -> list[int]:
        """Take the slots from all samples."""
        if self.samples.work.decoded_rows is None:
            self.made.clear()
        return self.samples.release([*self.samples.slot_of])


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
        _batch_to_make(lanes, step, ahead)
        or next((job for held in lanes if (job := lane_to_plan(held, step))), None)
        or _samples_to_read(lanes, step, waited_for)
    )


def batch_to_make(held: HeldLane, step: int) -> LaneJob | None:
    """Make this lane's batch of this step, if that is possible now."""
    now = held.now
    if step in now.making or step in now.made or not now.may_make(step):
        return None
    return LaneJob("make", held, now, step)


def lane_to_plan(held: HeldLane, step: int) -> LaneJob | None:
    """Walk this lane's order up to `step`, or one step further."""
    now = held.now
    following = step if now.next_step is None else now.next_step
    if now.planning or following >= min(step + 2, len(now.of)):
        return None
    return LaneJob("plan", held, now, following)


def _batch_to_make(lanes: Sequence[HeldLane], step: int, ahead: int) -> LaneJob | None:
    if sum(len(held.now.made) + len(held.now.making) for held in lanes) >= ahead:
        return None
    pending = [held for held in lanes if held.now.taken_step < step]
    open_ = [h for h in pending if step not in h.now.made and step not in h.now.making]
    if job := _first_to_make(open_, step):
        return job
    if any(step not in h.now.planned or len(h.now.planned[step].positions) for h in open_):
        return None
    return _first_to_make(lanes, step + 1)


def _first_to_make(lanes: Iterable[HeldLane], step: int) -> LaneJob | None:
    for held in lanes:
        serve = held.now.planned.get(step)
        if serve is not None and len(serve.positions) and (job := batch_to_make(held, step)):
            return job
    return None


def _samples_to_read(
    lanes: Sequence[HeldLane], step: int, waited_for: HeldLane | None
) -> LaneJob | None:
    found: list[tuple[int, int, LaneJob]] = []
    for held in lanes:
        room, now, coming = held.room, held.now, held.coming
        if room is None or not room.free:
            continue
        if now.may_read:
            urgency = 1 + now.lacks(step + 1) + 2 * (now.lacks(step) and now.taken_step < step)
            urgency += 4 * (held is waited_for)
            found.append((urgency, len(room.free), LaneJob("read", held, now, step)))
        elif now.all_taken and coming is not None and coming.may_read and not now.error:
            found.append((0, len(room.free), LaneJob("read", held, coming, 0)))
    return max(found, key=lambda each: each[:2])[2] if found else None
