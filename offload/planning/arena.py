"""The addresses of one arena: what is taken, what is free, who last touched free bytes. Pure.

    0      64        192              448   512
    |  w   |   free  |       a1       | free | ...     a segment is taken or free
           |n7 |n9,12|                              pieces of a free one: the nodes that must end
                                                    before these bytes are written again

The pieces are the history of section 4 of the DISCO paper. When bytes are given out again, their
memory dependencies are read off the pieces. Bytes that nobody ever touched have no piece.

Neighbouring free segments are merged; their pieces stay separate. Sorted lists find segments by
address and free ones by size.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

Piece = tuple[int, int, tuple[int, ...]]
"""First byte, end, and the nodes that must end before the bytes are written again."""
FREE = "free"
BESIDE = 2
"""An address is held back while the host does so many times the work that its workers do during the
tasks that touched it: once for what runs beside these tasks, once for what is copied ahead."""


class Space:
    """Bytes [0, capacity), all free at first. All sizes and offsets are multiples of the graph's
    alignment."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        """The highest end of the bytes that were ever taken."""
        self.free = 0
        self._starts: list[int] = []
        self._ends: dict[int, int] = {}
        self._owners: dict[int, object] = {}
        self._pieces: dict[int, deque[Piece]] = {}
        self._sizes: list[tuple[int, int]] = []
        if capacity:
            self._add_free(0, capacity, deque())

    def best_fit(self, nbytes: int, high: bool = False) -> int | None:
        """Where to put `nbytes`: at the low (or high) end of the smallest free segment that holds
        them. None if no segment does."""
        at = bisect_left(self._sizes, (nbytes, -1))
        if at == len(self._sizes):
            return None
        size, start = self._sizes[at]
        return start + size - nbytes if high else start

    def take(self, offset: int, nbytes: int, owner: object) -> list[Piece]:
        """Take bytes of a free segment. Returns the pieces of history that lie there."""
        start = self._starts[bisect_right(self._starts, offset) - 1]
        end, stop = self._ends[start], offset + nbytes
        assert self._owners[start] is FREE and stop <= end, "these bytes are taken"
        pieces = self._drop_free(start, end)
        before, here, after = _cut(pieces, offset, stop, start, end)
        if start < offset:
            self._add_free(start, offset, before)
        if stop < end:
            self._add_free(stop, end, after)
        self._add(offset, stop, owner)
        self.used = max(self.used, stop)
        return here

    def give(self, offset: int, pieces: Sequence[Piece]) -> None:
        """Free a segment. `pieces` cover all of it, or the part that was ever touched."""
        end = self._ends[offset]
        self._drop(offset)
        start, whole = offset, deque(pieces)
        at = bisect_left(self._starts, offset)
        if at < len(self._starts) and self._owners[right := self._starts[at]] is FREE:
            right_end = self._ends[right]
            whole = _join(whole, self._drop_free(right, right_end))
            end = right_end
        if at and self._owners[left := self._starts[at - 1]] is FREE:
            whole = _join(self._drop_free(left, self._ends[left]), whole)
            start = left
        self._add_free(start, end, whole)

    def neighbours(self, offset: int) -> tuple[int | None, int | None]:
        """The segments before and after the one that starts at `offset`."""
        at = bisect_left(self._starts, offset)
        before = self._starts[at - 1] if at else None
        return before, self._starts[at + 1] if at + 1 < len(self._starts) else None

    def owner(self, start: int) -> object:
        """The owner of the segment that starts here; None if none starts here or it is free."""
        owner = self._owners.get(start)
        return None if owner is FREE else owner

    def is_free(self, start: int) -> bool:
        return self._owners[start] is FREE

    def end(self, start: int) -> int:
        return self._ends[start]

    def segments(self) -> list[int]:
        """The starts of all segments, ascending."""
        return list(self._starts)

    # ---- the books ------------------------------------------------------------------------------

    def _add(self, start: int, end: int, owner: object) -> None:
        insort(self._starts, start)
        self._ends[start] = end
        self._owners[start] = owner

    def _drop(self, start: int) -> None:
        del self._starts[bisect_left(self._starts, start)]
        del self._ends[start], self._owners[start]

    def _add_free(self, start: int, end: int, pieces: deque[Piece]) -> None:
        self._add(start, end, FREE)
        self._pieces[start] = pieces
        insort(self._sizes, (end - start, start))
        self.free += end - start

    def _drop_free(self, start: int, end: int) -> deque[Piece]:
        self._drop(start)
        del self._sizes[bisect_left(self._sizes, (end - start, start))]
        self.free -= end - start
        return self._pieces.pop(start)


class HeldAddresses:
    """The free addresses of the host's arena, and those that will be free later.

        worker 0   |---- u1 reads a ----|---- u4 reads d ----|
        worker 1      |---- u2 reads b ----|
        worker 2         |---- u3 reads c ----|

    Whoever writes to `a` waits for u1. If the next gradient lay in `a`, its update would wait for
    u1, too, and one worker would run at a time. So an address is given out again when the host has
    done `BESIDE` times the work that all workers do while the tasks run that touched it. Where the
    arena has no other room, the address that is due first is given out at once: that costs a wait,
    but no bytes."""

    def __init__(self, space: Space, workers: int) -> None:
        """`workers`: how many tasks the host runs at once. 0: every address is free at once."""
        self._space, self._workers = space, workers
        self._work = 0.0
        """Seconds of all tasks of the host so far."""
        self._held: list[tuple[float, int, Sequence[Piece]]] = []
        """A heap: the work after which an address is due, the address, its history."""

    def count_task(self, seconds: float) -> None:
        """Count a task of the host, and free what is due by now."""
        self._work += seconds
        while self._held and self._held[0][0] <= self._work:
            self._free_next()

    def give(self, offset: int, pieces: Sequence[Piece], seconds: float) -> None:
        """Free an address. `seconds`: of all tasks of the host that touched it."""
        if not (self._workers and seconds):
            self._space.give(offset, pieces)
            return
        due = self._work + BESIDE * self._workers * seconds
        heappush(self._held, (due, offset, pieces))

    def best_fit(self, nbytes: int) -> int | None:
        """Where to put `nbytes`. None if there is no room though nothing is held back any more."""
        while (offset := self._space.best_fit(nbytes)) is None and self._held:
            self._free_next()
        return offset

    def _free_next(self) -> None:
        _, offset, pieces = heappop(self._held)
        self._space.give(offset, pieces)


def _join(left: deque[Piece], right: deque[Piece]) -> deque[Piece]:
    """Both in one deque. The shorter one is moved into the longer one."""
    if len(left) < len(right):
        right.extendleft(reversed(left))
        return right
    left.extend(right)
    return left


def _cut(
    pieces: deque[Piece], start: int, stop: int, low: int, high: int
) -> tuple[deque[Piece], list[Piece], deque[Piece]]:
    """What lies before `start`, between `start` and `stop`, and after `stop`.

    Bytes are mostly taken at an end of a free segment, so the longer rest stays in the same
    deque."""
    other: deque[Piece] = deque()
    here: list[Piece] = []
    if high - stop >= start - low:  # the rest after `stop` is longer, so work from the left
        while pieces and pieces[0][0] < stop:
            first, last, nodes = pieces.popleft()
            if first < start:
                other.append((first, min(last, start), nodes))
            if last > start:
                here.append((max(first, start), min(last, stop), nodes))
            if last > stop:
                pieces.appendleft((stop, last, nodes))
                break
        return other, here, pieces
    while pieces and pieces[-1][1] > start:
        first, last, nodes = pieces.pop()
        if last > stop:
            other.appendleft((max(first, stop), last, nodes))
        if first < stop:
            here.append((max(first, start), min(last, stop), nodes))
        if first < start:
            pieces.append((first, start, nodes))
            break
    here.reverse()
    return pieces, here, other
