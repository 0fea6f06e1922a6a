"""Which tasks use each buffer, and how far the walk of a planner has come. Pure.

    uses of a buffer   2  |  5   6  |  9
                       ran   pinned    next

Uses that are pinned have their places and have not run.
"""

from offload.graph.taskgraph import TaskGraph
from offload.planning.victims import NEVER

SOON = 8
"""A buffer whose last use is at most this many tasks away dies soon."""


class WalkedUses:
    """The uses of all buffers. A use is the number of a task that touches the buffer."""

    def __init__(self, graph: TaskGraph) -> None:
        self._tasks: list[list[int]] = [[] for _ in graph.buffers]
        self._next = [0] * len(graph.buffers)
        """By buffer: how many of its uses have their places."""
        self._pins = [0] * len(graph.buffers)
        """By buffer: how many of its uses have their places, or try to get them, and have not
        run."""
        for number, task in enumerate(graph.tasks):
            for b in task.touches:
                self._tasks[b].append(number)

    def any(self, b: int) -> bool:
        return bool(self._tasks[b])

    def next(self, b: int) -> int:
        """The first use that has no place yet; NEVER if there is none."""
        uses, at = self._tasks[b], self._next[b]
        return uses[at] if at < len(uses) else NEVER

    def end_soon(self, b: int, number: int) -> bool:
        """Whether the last use comes soon after a task."""
        return self._tasks[b][-1] - number <= SOON

    def advance(self, b: int) -> None:
        """Note that the next use has its place."""
        self._next[b] += 1

    def pin(self, b: int) -> None:
        self._pins[b] += 1

    def unpin(self, b: int) -> None:
        self._pins[b] -= 1

    def pinned(self, b: int) -> bool:
        """Whether the buffer must stay where it is, because a task with a place has yet to run."""
        return self._pins[b] > 0
