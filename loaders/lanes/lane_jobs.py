"""What a thread does next for the lanes that are held here.

    make    a batch whose samples are all there, up to `ahead` batches before they are asked for
    plan    walk a lane's order to this step, and to the one after it
    read    samples: first for the lane that is waited for, then for batches of this step, then for
            those of the next one, then wherever most slots are free

Lanes come in the order in which they were given. Nothing is made for the next step while a batch of
this step might be.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from loaders.lanes.held_lanes import HeldLane, LaneProgress


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
    """Walk this lane's order to `step`, or one step further."""
    now = held.now
    if now.planning or step >= len(now.of):
        return None
    if step not in now.planned:
        return LaneJob("plan", held, now, step)
    if step + 1 < len(now.of) and step + 1 not in now.planned:
        return LaneJob("plan", held, now, step + 1)
    return None


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
    best: tuple[int, int] | None = None
    found: LaneJob | None = None
    for held in lanes:
        room, now, coming = held.room, held.now, held.coming
        if room is None or not room.free or now.error is not None or now.jobs is None:
            continue
        if not now.all_taken:
            urgency = 1 + now.lacks(step + 1) + 2 * (now.lacks(step) and now.taken_step < step)
            urgency += 4 * (held is waited_for)
            job = LaneJob("read", held, now, step)
        elif coming is not None and coming.error is None and not coming.all_taken:
            urgency, job = 0, LaneJob("read", held, coming, 0)
        else:
            continue
        if best is None or (urgency, len(room.free)) > best:
            best, found = (urgency, len(room.free)), job
    return found
