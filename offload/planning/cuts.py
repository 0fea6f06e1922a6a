"""Finds where a step may be cut, what lives across a cut, and the pieces between cuts. Pure.

    nodes    F1  F2 | B2  B1  U1          a cut is given by the number of nodes before it
             [ a1 ======= ]               live in: lies on a device, and a later node touches it
    [ w2 ===== ...................]       live out: no later node touches it, but it must be there
                                          when the step is over

Every cut in the order of a plan's nodes is possible, because nodes wait only for smaller numbers.
Where the order is free, pieces are found by what their nodes have in common (`pieces_by_host`), or
by the nodes at which they begin (`begun_at`).
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import overload

from offload.graph.memgraph import MemGraph, Place
from offload.graph.taskgraph import HOST, Task

Timeline = Sequence[tuple[int, str, float, float]]
"""Node, lane, start, end."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A moment between two nodes of a plan, when every node before it is done."""

    position: int
    """The number of nodes before it."""
    seconds_left: float
    """Seconds that the simulated step still takes after it."""
    live_bytes: int
    """Bytes on the devices that must outlast a pause here: those of `live_in` and `live_out`."""
    live_in: frozenset[int]
    """Numbers of the blocks that must lie there again before the next node runs."""
    live_out: frozenset[int]
    """Numbers of the blocks that need not lie there again before the step is over."""


@dataclass(frozen=True, slots=True)
class Stay:
    """How long a block holds something: from before its first node to after its last."""

    block: int
    first: int
    """Its first node; -1 if it lies there when the step begins."""
    last: int
    """The last node that touches it."""
    end: int
    """The last position at which it must be there."""


class Cuts(Sequence[Cut]):
    """All cuts of a plan: before its first node, between any two nodes, after its last node."""

    def __init__(self, memgraph: MemGraph, timeline: Timeline) -> None:
        self._count = len(memgraph.nodes)
        self._stays = _stays(memgraph)
        self._bytes = _live_bytes(memgraph, self._stays)
        ends = {node: end for node, _, _, end in timeline}
        self._done = list(accumulate((ends[n] for n in range(self._count)), max, initial=0.0))

    def __len__(self) -> int:
        return self._count + 1

    @overload
    def __getitem__(self, position: int) -> Cut: ...

    @overload
    def __getitem__(self, position: slice) -> Sequence[Cut]: ...

    def __getitem__(self, position: int | slice) -> Cut | Sequence[Cut]:
        if isinstance(position, slice):
            return [self[at] for at in range(*position.indices(len(self)))]
        at = range(len(self))[position]
        live = [stay for stay in self._stays if stay.first < at <= stay.end]
        return Cut(
            position=at,
            seconds_left=self._done[-1] - self._done[at],
            live_bytes=self._bytes[at],
            live_in=frozenset(stay.block for stay in live if stay.last >= at),
            live_out=frozenset(stay.block for stay in live if stay.last < at),
        )


def _stays(memgraph: MemGraph) -> list[Stay]:
    """The stays of all blocks on a device that hold something before or after a node."""
    found: list[Stay] = []
    for number, block in enumerate(memgraph.blocks):
        last = max(block.nodes, default=-1)
        first = -1 if block.from_start else min(block.nodes, default=-1)
        if block.place.arena != HOST:
            found.append(Stay(number, first, last, len(memgraph.nodes) if block.to_end else last))
    return found


def _live_bytes(memgraph: MemGraph, stays: Iterable[Stay]) -> list[int]:
    """The live bytes at every position."""
    change = [0] * (len(memgraph.nodes) + 2)
    for stay in stays:
        nbytes = memgraph.blocks[stay.block].place.nbytes
        if stay.first < stay.end:
            change[stay.first + 1] += nbytes
            change[stay.end + 1] -= nbytes
    return list(accumulate(change))[:-1]


# ---- pieces --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """The nodes between two cuts, in the order of the plan."""

    nodes: tuple[int, ...]
    on_host: bool = False
    """Whether the host must act, so that no device can run this piece by itself."""


def live_after(memgraph: MemGraph, done: Collection[int]) -> list[Place]:
    """Return the places on devices whose bytes matter when these nodes have run and no other one,
    whatever the order was: later nodes read them, or they must be there when the step is over."""
    done = frozenset(done)
    touched = {block.buffer for block in memgraph.blocks}
    places = [place for number, place in memgraph.starts.items() if number not in touched]
    for block in memgraph.blocks:
        begun = block.from_start or not done.isdisjoint(block.nodes)
        if begun and (block.to_end or not done.issuperset(block.nodes)):
            places.append(block.place)
    return [place for place in places if place.arena != HOST and place.nbytes]


def pieces_at(positions: Iterable[int], count: int) -> tuple[Piece, ...]:
    """Cut `count` nodes, in their order, at these positions. No piece is empty."""
    borders = sorted({0, count, *(at for at in positions if 0 < at < count)})
    return tuple(Piece(tuple(range(start, stop))) for start, stop in pairwise(borders))


def pieces_by_host(on_host: Sequence[bool], deps: Sequence[Sequence[int]]) -> tuple[Piece, ...]:
    """Pieces of the device and of the host in turns. `deps`: the nodes before each node, all of
    smaller numbers.

        nodes   F1 W2 F2 B2 g2>  |  U2 U1 (host)  |  W1' ...

    Every dependency stays within a piece or leads to a later one. No other division has fewer
    pieces of the device: each node is in the first piece that it may be in, which follows from the
    number of times that the longest path to it changes to the host."""
    level: list[int] = []
    groups: dict[int, list[int]] = {}
    for number, (host, before) in enumerate(zip(on_host, deps, strict=True)):
        # Levels take turns: the host's are even, the device's odd.
        at = max((level[other] for other in before), default=0)
        at += at % 2 == host
        level.append(at)
        groups.setdefault(at, []).append(number)
    return tuple(Piece(tuple(groups[at]), on_host=at % 2 == 0) for at in sorted(groups))


def shorter(pieces: Iterable[Piece], seconds: Sequence[float], most: float) -> tuple[Piece, ...]:
    """Cut the device's pieces so that each takes at most so many seconds, as far as nodes allow.
    `seconds`: by node."""
    found: list[Piece] = []
    for piece in pieces:
        nodes, took = list[int](), 0.0
        for node in piece.nodes:
            if nodes and not piece.on_host and took + seconds[node] > most:
                found.append(replace(piece, nodes=tuple(nodes)))
                nodes, took = [], 0.0
            nodes.append(node)
            took += seconds[node]
        found.append(replace(piece, nodes=tuple(nodes)))
    return tuple(found)


def begun_at(numbers: Sequence[int], begins: Collection[int]) -> list[list[int]]:
    """Cut `numbers`, in their order, into lists. Each but the first begins with one of `begins`."""
    lists: list[list[int]] = [[]]
    for number in numbers:
        if number in begins:
            lists.append([])
        lists[-1].append(number)
    return lists


def crossing(before: Iterable[Task], after: Iterable[Task]) -> set[int]:
    """The buffers that carry something over a cut of a graph. A task before the cut writes them,
    and a task after it reads them before another one writes them again."""
    written = {buffer for task in before for buffer in task.writes}
    carried: set[int] = set()
    for task in after:
        carried |= written.intersection(task.reads)
        written.difference_update(task.writes)
    return carried
