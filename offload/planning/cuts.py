"""Finds the pieces of a step between cuts, and what lives across a cut. Pure.

    nodes    F1  F2 | B2  B1  U1
             [ a1 ======= ]               live: a later node touches it,
             [ w2 ===== ..............]   or it must be there when the step is over

Pieces are found by what their nodes have in common (`pieces_by_host`), or by the nodes at which
they begin (`begun_at`).
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from offload.graph.memgraph import MemGraph, Place
from offload.graph.taskgraph import HOST

Timeline = Sequence[tuple[int, str, float, float]]
"""Node, lane, start, end."""


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
