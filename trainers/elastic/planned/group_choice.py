"""How many lanes of a peer run together in a live step. It is found out in the steps themselves.

    first update | a single lane -> are weights copied? -> 2 lanes -> better? -> 4 -> better? -> 8
                                    no: single lanes       no: stop             no: stop

Which size is the best one says `deciding/group_size.py`, from what their plans predict.
"""

from collections.abc import Sequence

from offload import Plan
from offload.graph.memgraph import RELOAD
from trainers.elastic.deciding.group_size import best_size, next_size


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
            plan.remarks.say(text)


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
