"""How fast copies and tasks of the host run beside each other. Pure.

    rate ^   |#|                  All rates rise together. A flow stops when it is as fast as it
         |   |#|  |#| |#|         would be alone, or when something that it goes over is used up:
         |   |#|  |#| |#|         max-min fairness. Here b and c share an uplink, and a does not.
              a    b   c

The two directions of a device's link slow each other down by `Costs.shared`. Without a topology
nothing else is shared.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from offload.graph.costs import Costs
from offload.graph.memgraph import TASK, Node, ends_of_lane, lane_name
from offload.graph.taskgraph import HOST, TaskGraph
from offload.graph.topology import Use, share_fairly


@dataclass(frozen=True, slots=True)
class Route:
    """What the nodes of a lane go over."""

    uses: tuple[Use, ...]
    ways: tuple[str, ...]
    """The directions of devices' links, as lanes."""

    @classmethod
    def of_lane(cls, lane: str, costs: Costs) -> "Route":
        topology = costs.topology
        if lane == "host":
            return cls(() if topology is None else topology.uses_by_tasks(), ())
        if topology is None:
            return cls((), (lane,))
        source, target = ends_of_lane(lane)
        uses = tuple(topology.list_uses(source, target, costs.h2d, costs.d2h))
        through_host = HOST in (source, target) or topology.between is None
        ends = (("d2h", source), ("h2d", target)) if through_host else ()
        return cls(uses, tuple(lane_name(way, d) for way, d in ends if d != HOST))


def flow_bytes(node: Node, graph: TaskGraph) -> int:
    """The bytes that a copy moves, or that a task of the host reads and writes."""
    return graph.tasks[node.task].traffic if node.kind == TASK else node.nbytes


@dataclass(slots=True, eq=False)
class _Flow:
    """A copy or a task of the host that runs now."""

    route: Route
    rate: float
    """Its bytes per second alone."""
    left: float
    """The seconds that it would still take alone, at `since`."""
    since: float
    pace: float = 1.0
    """How many of these pass in a second."""


class Flows:
    """All flows that run now."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._routes: dict[str, Route] = {}
        self._running: dict[int, _Flow] = {}
        self._ways: Counter[str] = Counter()
        """How many of them go over each direction of a link."""

    def begin(
        self, number: int, lane: str, nbytes: int, seconds: float, now: float
    ) -> Iterator[tuple[int, float]]:
        """Begin a flow that takes so long alone. Yields (node, end) of every flow whose end
        changes: also of this one, if it does not run as if alone."""
        route = self._routes.get(lane)
        if route is None:
            route = self._routes[lane] = Route.of_lane(lane, self._costs)
        self._running[number] = _Flow(route, nbytes / seconds if seconds else 0.0, seconds, now)
        self._ways.update(route.ways)
        return self._set_paces(now)

    def end(self, number: int, now: float) -> Iterator[tuple[int, float]]:
        """End a flow. Yields (node, end) of every flow whose end changes."""
        self._ways.subtract(self._running.pop(number).route.ways)
        return self._set_paces(now)

    def _set_paces(self, now: float) -> Iterator[tuple[int, float]]:
        for (number, flow), pace in zip(self._running.items(), self._find_paces(), strict=True):
            if pace != flow.pace:
                flow.left -= (now - flow.since) * flow.pace
                flow.since, flow.pace = now, pace
                yield number, now + flow.left / pace

    def _find_paces(self) -> list[float]:
        flows = list(self._running.values())
        most = [
            self._costs.shared if any(self._ways[other_way(w)] for w in flow.route.ways) else 1.0
            for flow in flows
        ]
        if self._costs.topology is None:
            return most
        alone = [pace * flow.rate for pace, flow in zip(most, flows, strict=True)]
        rates = share_fairly(alone, [flow.route.uses for flow in flows])
        return [
            pace if rate == highest else rate / flow.rate
            for pace, rate, highest, flow in zip(most, rates, alone, flows, strict=True)
        ]


def other_way(way: str) -> str:
    """The lane of a link's other direction."""
    return ("d2h" if way.startswith("h2d") else "h2d") + way[3:]
