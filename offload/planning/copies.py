"""A buffer's bytes at one place, and the nodes that must end before they are used. Pure."""

from dataclasses import dataclass, field

from offload.graph.memgraph import Place
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

    def before_reading(self) -> list[int]:
        return [self.writer] if self.writer >= 0 and self.place.nbytes else []

    def before_writing(self) -> list[int]:
        if not self.place.nbytes:
            return []
        if self.readers or self.writer >= 0:
            return self.readers or [self.writer]
        return [node for _, _, nodes in self.pieces for node in nodes]

    def read_by(self, node: int) -> None:
        self.readers.append(node)
        self.nodes.append(node)

    def written_by(self, node: int) -> None:
        self.writer, self.readers = node, []
        if not self.nodes or self.nodes[-1] != node:
            self.nodes.append(node)

    def history(self) -> list[Piece]:
        """The pieces of history for whoever gets these bytes next."""
        if not self.nodes or not self.place.nbytes:
            return self.pieces
        nodes = tuple(self.readers) or (self.writer,)
        return [(self.place.offset, self.place.offset + self.taken, nodes)]
