"""A step cut where the host must act: what lies between is captured and replayed as one. Pure.

    nodes   F1 W2 F2 B2 g2>  |  U2 U1 (host)  |  W1' ...          captured | host | captured

Every dependency goes within a segment or from an earlier one to a later one, and there is no way
to do with fewer captured ones: a node is in the first that it may be in, after as many cuts as
the host is asked on the longest way to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """Nodes in the order in which they stand in the plan."""

    captured: bool
    """Or for the host."""
    nodes: tuple[int, ...]


def segments(captured: Sequence[bool], deps: Sequence[Sequence[int]]) -> tuple[Segment, ...]:
    """`captured`: whether a node can be; `deps`: who comes before it, smaller numbers all."""
    level: list[int] = []
    groups: dict[int, list[int]] = {}
    for number, (here, before) in enumerate(zip(captured, deps, strict=True)):
        # Levels take turns: the host's are even, captured ones odd.
        at = max((level[other] for other in before), default=0)
        at += at % 2 != here
        level.append(at)
        groups.setdefault(at, []).append(number)
    return tuple(Segment(at % 2 == 1, tuple(groups[at])) for at in sorted(groups))
