"""The nodes of a plan in the making. Pure.

    who wrote or read these bytes last (Copy)  --edges-->  the new node, which is the last now

Whoever reads bytes waits for their last writer. Whoever writes them waits for the readers since, or
for those who had the bytes before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from offload.graph.memgraph import TASK, Access, Node, Place, lane_name, lane_of_copy
from offload.graph.taskgraph import TaskGraph
from offload.planning.arena import Piece


@dataclass(slots=True, eq=False)
class Copy:
    """A buffer's bytes at one place, and the nodes that touched them there."""

    place: Place
    taken: int
    buffer: int | None
    pieces: list[Piece]
    """The nodes that must end before the first write."""
    writer: int = -1
    readers: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    from_start: bool = False
    host_seconds: float = 0.0
    """Of the host's tasks that touched them."""

    def nodes_before_reading(self) -> list[int]:
        return [self.writer] if self.writer >= 0 and self.place.nbytes else []

    def nodes_before_writing(self) -> list[int]:
        if not self.place.nbytes:
            return []
        if self.readers or self.writer >= 0:
            return self.readers or [self.writer]
        return [node for _, _, nodes in self.pieces for node in nodes]

    def note_read(self, node: int) -> None:
        self.readers.append(node)
        self.nodes.append(node)

    def note_write(self, node: int) -> None:
        self.writer, self.readers = node, []
        if not self.nodes or self.nodes[-1] != node:
            self.nodes.append(node)

    def history(self) -> list[Piece]:
        """The pieces of history for whoever gets these bytes next."""
        if not self.nodes or not self.place.nbytes:
            return self.pieces
        nodes = tuple(self.readers) or (self.writer,)
        return [(self.place.offset, self.place.offset + self.taken, nodes)]


class NodeList:
    """Grows by one node at a time, each with its edges."""

    def __init__(self, graph: TaskGraph) -> None:
        self._buffers, self._tasks = graph.buffers, graph.tasks
        self._nodes: list[Node] = []
        self._of_task = [-1] * len(graph.tasks)

    def nodes(self) -> tuple[Node, ...]:
        return tuple(self._nodes)

    def copy(self, kind: str, b: int, number: int, source: Copy, target: Copy) -> None:
        """Add an offload, a reload or a send of a buffer, for the sake of a task."""
        buffer = self._buffers[b]
        deps = {*source.nodes_before_reading(), *target.nodes_before_writing()}
        accesses = (Access(source.place, b, True, False), Access(target.place, b, False, True))
        lane = lane_of_copy(source.place.arena, target.place.arena)
        edges, node = tuple(sorted(deps)), len(self._nodes)
        self._nodes.append(
            Node(kind, lane, accesses, edges, task=number, buffer=b, nbytes=buffer.nbytes)
        )
        source.note_read(node)
        target.note_write(node)

    def task(self, number: int, operands: Sequence[Copy], workspace: Copy | None) -> None:
        """Add a task. `operands`: where each buffer lies that it touches."""
        task = self._tasks[number]
        pairs = list(zip(task.touches, operands, strict=True))
        deps = {self._of_task[before] for before in task.after}
        accesses: list[Access] = []
        for b, copy in pairs:
            reads, writes = b in task.reads, b in task.writes
            if reads:
                deps.update(copy.nodes_before_reading())
            if writes:
                deps.update(copy.nodes_before_writing())
            accesses.append(Access(copy.place, b, reads, writes))
        if workspace is not None:
            deps.update(workspace.nodes_before_writing())
            accesses.append(Access(workspace.place, None, False, True))
        node = self._of_task[number] = len(self._nodes)
        edges = tuple(sorted(deps))
        lane = lane_name(task.lane, task.device)
        self._nodes.append(Node(TASK, lane, tuple(accesses), edges, task=number))
        for b, copy in pairs:
            if b in task.reads:
                copy.note_read(node)
            if b in task.writes:
                copy.note_write(node)
        if workspace is not None:
            workspace.note_write(node)
