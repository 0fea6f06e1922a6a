"""Builds a TaskGraph, one buffer and one task after the other. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any

from offload.graph.taskgraph import Buffer, Role, Task, TaskGraph


class GraphBuilder:
    """Grows by `buffer`, `task` and `output`; `graph` makes the graph, which is frozen."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.tasks: list[Task] = []
        self.outputs: list[int] = []

    def buffer(self, name: str, nbytes: int, role: Role | str = Role.TEMPORARY) -> int:
        """Add a buffer, and return its number."""
        self.buffers.append(Buffer(name, int(nbytes), Role(role), tensor=name))
        return len(self.buffers) - 1

    def task(
        self, name: str, reads: Iterable[int] = (), writes: Iterable[int] = (), **more: Any
    ) -> int:
        """Add a task, and return its number."""
        self.tasks.append(Task(name, tuple(reads), tuple(writes), **more))
        return len(self.tasks) - 1

    def output(self, buffer: int) -> None:
        """Name a buffer that the caller reads after the step."""
        self.outputs.append(buffer)

    def graph(self, program: Any = None, notes: Sequence[str] = ()) -> TaskGraph:
        """The graph as it is now. It does not change if the builder grows on."""
        return TaskGraph(
            tuple(self.buffers), tuple(self.tasks), tuple(self.outputs), program, tuple(notes)
        )
