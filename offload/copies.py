"""A buffer's bytes at one place, and who must be over before they are read or written. Pure."""

from dataclasses import dataclass, field

from offload.arena import Piece
from offload.memgraph import Place


@dataclass(slots=True, eq=False)
class Copy:
    """A buffer's bytes at one place, and the nodes that touched them there."""

    place: Place
    taken: int
    buffer: int | None
    pieces: list[Piece]
    """Who must be over before the first write."""
    writer: int = -1
    readers: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    from_start: bool = False

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
        """For whoever gets these bytes next."""
        if not self.nodes or not self.place.nbytes:
            return self.pieces
        nodes = tuple(self.readers) or (self.writer,)
        return [(self.place.offset, self.place.offset + self.taken, nodes)]
