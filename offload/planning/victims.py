"""Chooses what to evict from an arena: the window of segments that costs least to empty. Pure.

    |  w3  |free|   a1   |   a2   |  w4  |      a window: neighbouring free segments and blocks
            ----------------------              that may go; together they hold the needed bytes
                  window

Its cost is the bytes to move, divided by the time until the first of them is needed again. So the
furthest next use goes first, and among equals the one that is cheap to bring back.

Windows are grown around the blocks with the furthest next use. Only if none of them grows large
enough are all windows looked at.

Long before its turn a task may only drop blocks: those that the host has, too, and that are needed
later than the task.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from offload.graph.taskgraph import TaskGraph
from offload.planning.arena import Space

NEVER = 1 << 60
SEEDS = 12
SOON = 8
"""A buffer whose last use is at most this many tasks away dies soon."""


@dataclass(frozen=True, slots=True)
class Stake:
    """What evicting a block costs."""

    next_use: int
    """The task that uses it next; NEVER if there is none."""
    until: float
    """The time at which that task runs."""
    moved: int
    """Bytes to copy out and in."""
    dropped: bool = False
    """Whether nothing has to be copied out."""


class Victims:
    """The blocks of one arena. Only blocks owned by buffers (numbers) can go."""

    def __init__(self, space: Space, stake: Callable[[int], Stake | None]) -> None:
        self._space = space
        self._stake = stake
        self._furthest: list[tuple[int, int, int]] = []
        """(minus the next use, buffer, offset); entries may be out of date."""
        self._clean: list[tuple[int, int, int]] = []
        """The same of blocks that could be dropped when they were noted."""
        self._dropped_for: int | None = None
        self._stakes: dict[int, Stake | None] = {}
        """What is known for one window. Several windows grow over the same blocks."""

    def remember(self, buffer: int, next_use: int, offset: int, is_clean: bool) -> None:
        """Note a block, and whether it could be dropped. Call it whenever the block's next use has
        changed, or it has become clean."""
        entry = (-next_use, buffer, offset)
        heapq.heappush(self._furthest, entry)
        if is_clean:
            heapq.heappush(self._clean, entry)

    def find_window(
        self, size: int, now: float, dropped_for: int | None = None
    ) -> list[int] | None:
        """The segments to empty, from low to high; None if no window holds `size` bytes.
        `dropped_for`: only drop blocks, for this task."""
        self._dropped_for = dropped_for
        self._stakes.clear()
        best: tuple[float, list[int]] | None = None
        for start in self._find_seeds():
            grown = self._grow_window(start, size)
            if grown is not None:
                score = self._score(grown, now)
                if best is None or score < best[0]:
                    best = score, grown
        if best is None:
            return self._find_best_window(size, now) if dropped_for is None else None
        return best[1]

    def _at_stake(self, buffer: int) -> Stake | None:
        """What a block costs; None if it cannot go, or not for this task."""
        if buffer in self._stakes:
            return self._stakes[buffer]
        stake, task = self._stake(buffer), self._dropped_for
        if stake is not None and task is not None:
            stake = stake if stake.dropped and stake.next_use > task else None
        self._stakes[buffer] = stake
        return stake

    def _find_seeds(self) -> list[int]:
        """The starts of the blocks with the furthest next use."""
        kept: list[tuple[int, int, int]] = []
        seeds: list[int] = []
        heap = self._furthest if self._dropped_for is None else self._clean
        soonest = -1 if self._dropped_for is None else self._dropped_for
        while heap and len(seeds) < SEEDS and -heap[0][0] > soonest:
            entry = heapq.heappop(heap)
            next_use, buffer, start = entry
            if (kept and kept[-1] == entry) or self._space.owner(start) != buffer:
                continue
            stake = self._at_stake(buffer)
            if stake is None:
                kept.append(entry)  # it is in use at the moment
            elif stake.next_use == -next_use:
                kept.append(entry)
                seeds.append(start)
        for entry in kept:
            heapq.heappush(heap, entry)
        return seeds

    def _grow_window(self, start: int, size: int) -> list[int] | None:
        """Grow the window around a segment, always towards the side with the further next use."""
        space, window = self._space, [start]
        nbytes = space.end(start) - start
        before, after = space.neighbours(start)
        while nbytes < size:
            left, right = self._distance(before), self._distance(after)
            if left < 0 and right < 0:
                return None
            if left >= right:
                assert before is not None
                window.insert(0, before)
                nbytes += space.end(before) - before
                before = space.neighbours(before)[0]
            else:
                assert after is not None
                window.append(after)
                nbytes += space.end(after) - after
                after = space.neighbours(after)[1]
        return window

    def _distance(self, start: int | None) -> int:
        """The next use of the segment's block; -1 if it cannot go."""
        if start is None:
            return -1
        if self._space.is_free(start):
            return NEVER + 1
        owner = self._space.owner(start)
        stake = self._at_stake(owner) if isinstance(owner, int) else None
        return -1 if stake is None else stake.next_use

    def _score(self, window: list[int], now: float) -> float:
        moved, until = 0, float("inf")
        for start in window:
            owner = self._space.owner(start)
            stake = self._at_stake(owner) if isinstance(owner, int) else None
            if stake is not None:
                moved += stake.moved
                until = min(until, stake.until)
        return moved / max(until - now, 1e-9)

    def _find_best_window(self, size: int, now: float) -> list[int] | None:
        """The best of all windows, each as short as possible."""
        space = self._space
        best: tuple[float, list[int]] | None = None
        window: list[int] = []
        nbytes = 0
        for start in space.segments():
            if self._distance(start) < 0:
                window, nbytes = [], 0
                continue
            window.append(start)
            nbytes += space.end(start) - start
            while nbytes - (space.end(window[0]) - window[0]) >= size:
                first = window.pop(0)
                nbytes -= space.end(first) - first
            if nbytes >= size:
                score = self._score(window, now)
                if best is None or score < best[0]:
                    best = score, list(window)
        return None if best is None else best[1]


class WalkedUses:
    """The uses of all buffers on a device, and how far the walk has come. A use is the number of a
    task that touches the buffer.

        uses of a buffer   2  |  5   6  |  9
                           ran   pinned    next

    Pinned uses have their places and have not run."""

    def __init__(self, graph: TaskGraph, device: int) -> None:
        self._tasks: list[list[int]] = [[] for _ in graph.buffers]
        self._next = [0] * len(graph.buffers)
        """By buffer: how many of its uses have their places."""
        self._pins = [0] * len(graph.buffers)
        """By buffer: how many of its uses have their places, or try to get them, and have not
        run."""
        for number, task in enumerate(graph.tasks):
            for b in task.touches if task.device == device else ():
                self._tasks[b].append(number)

    def is_used(self, b: int) -> bool:
        return bool(self._tasks[b])

    def next(self, b: int) -> int:
        """The first use that has no place yet; NEVER if there is none."""
        uses, at = self._tasks[b], self._next[b]
        return uses[at] if at < len(uses) else NEVER

    def ends_soon(self, b: int, number: int) -> bool:
        """Whether the last use comes soon after a task."""
        return self._tasks[b][-1] - number <= SOON

    def advance(self, b: int) -> None:
        """Note that the next use has its place."""
        self._next[b] += 1

    def pin(self, b: int) -> None:
        self._pins[b] += 1

    def unpin(self, b: int) -> None:
        self._pins[b] -= 1

    def is_pinned(self, b: int) -> bool:
        """Whether the buffer must stay where it is, because a task with a place has yet to run."""
        return self._pins[b] > 0


def find_writers_elsewhere(graph: TaskGraph) -> list[int]:
    """By task: the last task before it that writes one of its operands, and that the host or
    another device runs; -1 if there is none. Until it has run, there is nothing to copy."""
    on_host: dict[int, int] = {}
    by_device: dict[int, dict[int, int]] = {}
    waits_for: list[int] = []
    for number, task in enumerate(graph.tasks):
        tables = [on_host]
        if task.lane != "host":
            tables += [table for device, table in by_device.items() if device != task.device]
        waits_for.append(
            max((table.get(b, -1) for table in tables for b in task.touches), default=-1)
        )
        table = on_host if task.lane == "host" else by_device.setdefault(task.device, {})
        table.update(dict.fromkeys(task.writes, number))
    return waits_for
