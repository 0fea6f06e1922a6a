"""What the proof of a plan says when it fails: which nodes, at which bytes, and why. Pure."""

from dataclasses import dataclass

from offload.errors import RaceFound
from offload.graph.memgraph import MemGraph, Place
from offload.graph.taskgraph import HOST

START, END = "the start of the step", "the end of the step"
WORKSPACE, NOTHING = -1, -2
"""What bytes hold if it is no buffer."""
Holding = tuple[int, int, int, int]
"""What bytes hold: a buffer (or WORKSPACE or NOTHING), how often it had been written, the offset
where it begins, and the node that put it there (-1: it was there at the start)."""
Use = tuple[int, int, int | None, bool, bool]
"""An access without its offset: arena, bytes, buffer, reads, writes."""


@dataclass(slots=True)
class Conflict:
    """Why a path must lead from one node to another. Without an arena it is because of `after`."""

    arena: int | None = None
    begin: int = 0
    end: int = 0
    verbs: tuple[str, str] = ("", "")


def span(place: Place) -> tuple[int, int, int]:
    return place.arena, place.offset, place.offset + place.nbytes


def describe_arena(arena: int) -> str:
    return "the host" if arena == HOST else f"device {arena}"


def _range(arena: int, begin: int, end: int) -> str:
    return f"bytes [{begin}, {end}) of {describe_arena(arena)}"


def name_of(memgraph: MemGraph, who: int | str) -> str:
    return who if isinstance(who, str) else memgraph.name(who)


def describe_use(memgraph: MemGraph, use: Use | None) -> str:
    if use is None:
        return "touches no more"
    arena, nbytes, b, reads, writes = use
    verbs = " and ".join(["reads"] * reads + ["writes"] * writes) or "does nothing to"
    what = "workspace" if b is None else memgraph.graph.buffers[b].name
    return f"{verbs} {nbytes} bytes of {what} on {describe_arena(arena)}"


def fault(who: str, why: str, place: Place | None = None, after: str | None = None) -> RaceFound:
    """An error about one node or buffer."""
    where = span(place) if place else (HOST, 0, 0)
    message = f"{who}, {_range(*where)}: {why}" if place else f"{who}: {why}"
    return RaceFound(message, who if after is None else after, who, where)


def race(memgraph: MemGraph, a: int, b: int, conflict: Conflict) -> RaceFound:
    """An error about two nodes that no path joins, or one that touches the same bytes twice."""
    first, second = memgraph.name(a), memgraph.name(b)
    if conflict.arena is None:
        message = f"nothing orders {first} and {second}, though the latter must run after it"
        return RaceFound(message, first, second, (HOST, 0, 0))
    where = (conflict.arena, conflict.begin, conflict.end)
    verb_a, verb_b = conflict.verbs
    message = f"nothing orders {first} ({verb_a}) and {second} ({verb_b}) on {_range(*where)}"
    if a == b:
        message = f"{first} {verb_a} and {verb_b} two things on {_range(*where)}"
    return RaceFound(message, first, second, where)


def stale_bytes(
    memgraph: MemGraph,
    b: int,
    version: int | None,
    actual: Holding,
    where: tuple[int, int, int],
    who: int | str,
) -> RaceFound:
    """An error about bytes that hold something else than the buffer `b` in its `version`."""
    name, by = name_of(memgraph, who), START if actual[3] < 0 else memgraph.name(actual[3])
    expected, contents = _describe(memgraph, b, version), _describe(memgraph, *actual[:2])
    if expected == contents:
        contents += " at another offset"
    if actual[0] != NOTHING:
        contents += f", put there by {by}"
    message = f"{name} finds on {_range(*where)} {contents}: expected {expected}"
    return RaceFound(message, by, name, where)


def _describe(memgraph: MemGraph, b: int, version: int | None) -> str:
    if b < 0:
        return "nothing" if b == NOTHING else "a workspace"
    name = memgraph.graph.buffers[b].name
    if not version:
        return name if version is None else f"{name} as it was at the start"
    writers = [task.name for task in memgraph.graph.tasks if b in task.writes]
    return f"{name} as {writers[version - 1]} wrote it"
