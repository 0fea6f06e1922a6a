"""The order in which tensors move within the same memory, so that none is written over. Pure.

    before  |a a a|b b|. . .|c c|          b must leave before a comes, c may go at any time
    after   |c c|. . .|a a a|b b|          a circle is opened: its smallest one goes aside first

Every byte is copied once, but for those that go aside: one of each circle, and on a device those
that move by less than their own length.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

STRAIGHT, CREEPING, ASIDE, BACK = "straight", "creeping", "aside", "back"


@dataclass(frozen=True, slots=True)
class Shift:
    """Bytes that go from one address to another. No two overlap in where they come from, and no
    two in where they go to."""

    source: int
    target: int
    nbytes: int
    creeps: bool = False
    """Whether it can be copied in one go if source and target overlap."""

    @property
    def overlaps_itself(self) -> bool:
        return abs(self.target - self.source) < self.nbytes


@dataclass(frozen=True, slots=True)
class ShiftStep:
    """What is done next with a shift: copy it to its target, which overlaps its source if it
    creeps; or copy it aside, and later back from there to its target."""

    number: int
    how: str


def in_order(shifts: Sequence[Shift]) -> list[ShiftStep]:
    """The steps that bring all bytes to their targets."""
    blockers = _blockers(shifts)
    waiting: list[list[int]] = [[] for _ in shifts]
    for number, others in enumerate(blockers):
        for other in others:
            waiting[other].append(number)
    ready = [number for number, others in enumerate(blockers) if not others]
    largest_first = sorted(range(len(shifts)), key=lambda number: -shifts[number].nbytes)
    steps: list[ShiftStep] = []
    aside: set[int] = set()
    done: set[int] = set()
    while len(done) < len(shifts):
        if ready:
            number = ready.pop()
            steps += _last_steps(number, shifts[number], number in aside)
            done.add(number)
            if number in aside:
                continue
        else:  # all that is left waits for each other
            number = largest_first.pop()
            if number in done or number in aside:
                continue
            steps.append(ShiftStep(number, ASIDE))
            aside.add(number)
        for other in waiting[number]:
            blockers[other].discard(number)
            if not blockers[other]:
                ready.append(other)
    return steps


def _last_steps(number: int, shift: Shift, is_aside: bool) -> list[ShiftStep]:
    if is_aside:
        return [ShiftStep(number, BACK)]
    if not shift.overlaps_itself:
        return [ShiftStep(number, STRAIGHT)]
    if shift.creeps:
        return [ShiftStep(number, CREEPING)]
    return [ShiftStep(number, ASIDE), ShiftStep(number, BACK)]


def _blockers(shifts: Sequence[Shift]) -> list[set[int]]:
    """For each shift, the others that come from where it goes to."""
    by_source = sorted(range(len(shifts)), key=lambda number: shifts[number].source)
    ends = [shifts[number].source + shifts[number].nbytes for number in by_source]
    blockers: list[set[int]] = []
    for number, shift in enumerate(shifts):
        others: set[int] = set()
        at = bisect_left(ends, shift.target + 1)
        while at < len(by_source):
            other = by_source[at]
            if shifts[other].source >= shift.target + shift.nbytes:
                break
            if other != number:
                others.add(other)
            at += 1
        blockers.append(others)
    return blockers
