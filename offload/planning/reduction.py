"""Leaves out every edge that a longer path implies, so that the fewest edges remain. Pure.

    1 -> 2 -> 3      1 -> 3 adds nothing

The reduction of an acyclic graph is unique. Ancestors are sets of bits, made for a chunk of nodes
at a time, so that memory only grows with the number of nodes.
"""

from collections.abc import Sequence

CHUNK = 4096
"""How many possible ancestors are tracked at a time."""


def reduce_edges(deps: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """The same dependencies without those that others imply. `deps[v]`: smaller numbers."""
    kept = [sorted(set(before), reverse=True) for before in deps]
    last_child = [0] * len(kept)
    for node, before in enumerate(kept):
        for dep in before:
            last_child[dep] = node
    for low in range(0, len(kept), CHUNK):
        high = min(low + CHUNK, len(kept))
        _reduce_from(kept, low, high, max(last_child[low:high]))
    return [tuple(reversed(before)) for before in kept]


def _reduce_from(kept: list[list[int]], low: int, high: int, last: int) -> None:
    """Leave out the implied edges that begin in [low, high)."""
    ancestors: list[int] = []
    """Of node low + i: its ancestors in the chunk and itself, as bits."""
    for node in range(low, last + 1):
        seen = 1 << (node - low) if node < high else 0
        implied = False
        for dep in kept[node]:  # larger numbers first, because what implies an edge is larger
            if dep < low:
                break
            mask = ancestors[dep - low]
            if dep < high and seen >> (dep - low) & 1:
                implied = True
            seen |= mask
        if implied:
            kept[node] = _without_implied(kept[node], ancestors, low, high)
        ancestors.append(seen)


def _without_implied(before: list[int], ancestors: list[int], low: int, high: int) -> list[int]:
    seen, result = 0, []
    for dep in before:
        if low <= dep < high and seen >> (dep - low) & 1:
            continue
        result.append(dep)
        if dep >= low:
            seen |= ancestors[dep - low]
    return result
