"""How many lanes of a peer run together in a live step. It is found out in the steps themselves.

    first update | a single lane -> are weights copied? -> 2 lanes -> better? -> 4 -> better? -> 8
                                    no: single lanes       no: stop             no: stop

A peer adds up its lanes in the order in which it computes them, and tells that order to the others
and to the log. A group is made of the next lanes in this order, whatever their numbers are, and
adds their gradients one after the other. So no bit depends on the size, and no peer has to know
the size of another one.
"""

from collections.abc import Mapping, Sequence

from offload import Plan
from offload.graph.memgraph import RELOAD

SIZES: tuple[int, ...] = (1, 2, 4, 8)
"""A swarm is advised to have eight lanes a peer, so a larger group would seldom be full."""
FASTER = 0.98
"""A larger group is worth its longer wait for news if a step takes at most this share."""


class GroupChoice:
    """One peer's."""

    def __init__(self, why_alone: str) -> None:
        """`why_alone`: why lanes cannot run together; empty if they may."""
        self._why_alone = why_alone
        self._seconds: dict[int, float] = {}
        """What the plans of so many lanes predict."""
        self._noted: set[int] = set()

    def size(self, lanes: int) -> int:
        """Return how many lanes run together where so many whole ones fall to the peer."""
        if self._why_alone or not self._seconds:
            return 1
        return next_size(self._seconds, lanes) or best_size(self._seconds, lanes)

    def note(self, size: int, lanes: int, plans: Sequence[Plan]) -> None:
        """Know of the plans by which `size` whole lanes ran, of the `lanes` that the peer has."""
        if size in self._noted:
            return
        self._noted.add(size)
        self._why_alone = self._why_alone or _why_alone(plans)
        if not self._why_alone:
            self._seconds[size] = plans[0].predicted_seconds
        told = ", ".join(f"{n}: {took / n:.3g} s" for n, took in self._seconds.items())
        text = (
            f"lanes run one by one: {self._why_alone}"
            if self._why_alone
            else f"lanes run {self.size(lanes)} at a time from now on; predicted for a lane {told}"
        )
        for plan in plans:
            plan.remarks.add(text)


def _why_alone(plans: Sequence[Plan]) -> str:
    """Say why a group would not help; empty: it may."""
    if len(plans) != 1:
        return f"the Python of a lane needs values in its middle, so it ran in {len(plans)} parts"
    if not _copies_weights(plans[0]):
        return "all weights are resident"
    return ""


def _copies_weights(plan: Plan) -> bool:
    buffers = plan.graph.buffers
    return any(n.kind == RELOAD and buffers[n.buffer].persistent for n in plan.memgraph.nodes)


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
