"""Cuts a step into pieces that the device runs alone, and pieces for which the host must act. Pure.

nodes    F1 F2 | U2 (host) | B2 B1
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Piece:
    """The nodes between two cuts, in the order of the plan."""

    nodes: tuple[int, ...]
    on_host: bool = False
    """Whether the host must act, so that no device can run this piece by itself."""


def cut_by_host(on_host: Sequence[bool], deps: Sequence[Sequence[int]]) -> tuple[Piece, ...]:
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


def shorten_pieces(
    pieces: Iterable[Piece], seconds: Sequence[float], most: float
) -> tuple[Piece, ...]:
    """Cut the device's pieces so that each takes at most so many seconds, as far as nodes allow.
    `seconds`: by node."""
    cut_pieces: list[Piece] = []
    for piece in pieces:
        nodes, took = list[int](), 0.0
        for node in piece.nodes:
            if nodes and not piece.on_host and took + seconds[node] > most:
                cut_pieces.append(replace(piece, nodes=tuple(nodes)))
                nodes, took = [], 0.0
            nodes.append(node)
            took += seconds[node]
        cut_pieces.append(replace(piece, nodes=tuple(nodes)))
    return tuple(cut_pieces)
