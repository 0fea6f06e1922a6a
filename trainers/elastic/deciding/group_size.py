"""How many lanes of a peer run as one graph, in which a weight comes in once for all of them.

    a peer's lanes     0 3 | 4 7 | 8                  size 2: two groups, and a single lane
    its sum            ((((0 + g0) + g3) + g4) ...    the same additions as one by one

A peer adds up its lanes in the order in which it computes them, and tells that order to the others
and to the log. A group is made of the next lanes in this order, whatever their numbers are, and
adds their gradients one after the other. So no bit depends on the size, and no peer has to know
the size of another one.
"""

from collections.abc import Mapping, Sequence

SIZES: tuple[int, ...] = (1, 2, 4, 8)
"""A swarm is advised to have eight lanes a peer, so a larger group would seldom be full."""
FASTER = 0.98
"""A larger group is worth its longer wait for news if a step takes at most this share."""


def next_size(seconds: Mapping[int, float], lanes: int) -> int | None:
    """Return the size that is to be planned next; None where no larger one is worth a try.

    `seconds`: what a graph of each size takes that is planned already, 1 among them. `lanes`: so
    many the peer has in a step."""
    if best_size(seconds, lanes) < max(seconds):
        return None
    return next((size for size in SIZES if max(seconds) < size <= lanes), None)


def best_size(seconds: Mapping[int, float], lanes: int) -> int:
    """Return the size with which a step of so many lanes is made first."""
    best = 1
    for size in sorted(seconds):
        if _of_step(seconds, size, lanes) <= FASTER * _of_step(seconds, best, lanes):
            best = size
    return best


def together(lanes: Sequence[int], sizes: Sequence[int], whole: int, first: int, group: int) -> int:
    """Return how many of the first of these lanes run as one graph: `group`, or 1.

    `sizes`: the samples of every lane. A lane with fewer than `whole` has a graph of its own.
    `first`: the step's first lane, whose buffers are committed. What a group leaves in the buffers
    is of its first lane, so this lane begins a group or is in none."""
    found = lanes[:group]
    if len(found) < group or first in found[1:] or any(sizes[lane] != whole for lane in found):
        return 1
    return group


def _of_step(seconds: Mapping[int, float], size: int, lanes: int) -> float:
    groups, singles = divmod(lanes, size)
    return groups * seconds[size] + singles * seconds[1]
