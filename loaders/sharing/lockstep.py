"""What a view of a shared stream does next: take, read on, wait, or read alone. It is pure.

     slowest                  fastest
        |                        |
    [k][k][k][k][k][k][k][k][k] following        [k]: read already, and not taken by all yet
        '--- at most `window` ---'

A mark is (pass, batch): the batch that a view takes next. Whoever needs the batch that follows
reads it, and it is kept for those that come later. Who is behind the oldest kept batch, or more
than a pass ahead, reads alone until its next pass begins.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Mark = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TakeKept:
    """The batch is there."""


@dataclass(frozen=True, slots=True)
class ReadNext:
    """Read the batch that follows; then ask again."""

    begin: Mark | None = None
    """Begin here before that, because nobody needs what is kept or would follow."""


@dataclass(frozen=True, slots=True)
class WaitFor:
    """The window is full until one of these views has taken a batch."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReadAlone:
    """The stream cannot give this batch."""


def is_in_reach(
    mark: Mark,
    others: Sequence[Mark],
    kept: Sequence[Mark],
    following: Mark | None,
    window: int,
    is_member: bool,
) -> bool:
    """Return whether a view at `mark` would go in step with the `others` of a stream: it finds its
    batch there, and none has to wait for another at once. A member may also be ahead by the rest of
    a pass, which it has left before its end."""
    if not others:
        return True
    head = min(others) if following is None else following
    if mark in kept or mark == head:
        return True
    if mark[0] == head[0]:
        return mark > head and mark[1] - head[1] + len(kept) < window
    return is_member and mark == (head[0] + 1, 0)


Action = TakeKept | ReadNext | WaitFor | ReadAlone


def oldest_needed(
    marks: Iterable[Mark], kept: Sequence[Mark], following: Mark | None
) -> Mark | None:
    """The lowest mark that the stream can still serve. None: all views are behind it. `kept` is in
    order. `following` None: it may begin anywhere."""
    first = kept[0] if kept else following
    return min((mark for mark in marks if first is None or mark >= first), default=None)


def next_action(
    name: str,
    marks: Mapping[str, Mark],
    kept: Sequence[Mark],
    following: Mark | None,
    window: int,
) -> Action:
    """Return what the view `name` does next. `marks` are those of all views that take part."""
    wanted = marks[name]
    needed = oldest_needed(marks.values(), kept, following)
    if needed is None:
        return ReadNext(begin=min(marks.values()))
    if wanted < needed:
        return ReadAlone()
    if wanted in kept:
        return TakeKept()
    left = sum(mark >= needed for mark in kept)
    begin = needed if not left and (following is None or following < needed) else None
    head = begin or following
    assert head is not None
    if wanted[0] > head[0] + 1:
        return ReadAlone()
    if left >= window:
        return WaitFor(tuple(other for other, mark in marks.items() if mark == needed))
    return ReadNext(begin)
