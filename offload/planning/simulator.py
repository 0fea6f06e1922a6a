"""How long a MemGraph takes on a machine of given rates, and the bound that no order can beat.
Pure.

    h2d      R w1 | R w2 |      | R w3 |         a free lane takes what is ready at once,
    compute       |  F1  |  F2  |      |  F3     the smallest number first ("priority")

Lanes run one node at a time; the host runs as many as it has workers. Copies and tasks of the host
slow each other down where they share something (`flows.py`). A step lasts at least as long as its
longest path of nodes, and as the work of its busiest lane, or of what is shared (`Bound`).
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Protocol

import numpy as np

from offload.graph.costs import Costs
from offload.graph.memgraph import OFFLOAD, RELOAD, TASK, MemGraph, Node, Place
from offload.graph.taskgraph import HOST, Role, TaskGraph
from offload.planning.flows import Flows, Route, flow_bytes, other_way

Timeline = Sequence[tuple[int, str, float, float]]
"""Each node with its lane, start and end, in the order of the starts."""
CRITICAL_PATH, LINK = "critical path", "link"


class HasMemGraph(Protocol):
    """Anything that has a MemGraph, such as a plan."""

    @property
    def memgraph(self) -> MemGraph: ...


@dataclass(frozen=True, slots=True)
class Bound:
    """The least seconds of a step in any order."""

    seconds: float
    lane: str
    """The part that sets the bound, one of `parts`."""
    parts: Mapping[str, float]
    """The work of each lane (for the host, a worker's share) and the critical path. For a link
    whose directions share its rate, also the work of both."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """One simulated run of a step."""

    makespan: float
    busy: Mapping[str, float]
    """Seconds of work of each lane; for the host, of all workers together."""
    bound: Bound
    timeline: Timeline


def simulate(
    plan: MemGraph | HasMemGraph, costs: Costs, order: str = "priority", seed: int = 0
) -> Simulation:
    """Simulate a step. `order`: "priority" (a free lane takes the ready node of lowest number),
    "random" (it takes any ready node), "in_order" (only its own next node, as a queue would)."""
    if order not in ("priority", "random", "in_order"):
        raise ValueError(f"order={order!r} is unknown; choose priority, random or in_order")
    memgraph = plan if isinstance(plan, MemGraph) else plan.memgraph
    seconds = node_seconds(memgraph, costs)
    timeline = _run(memgraph, seconds, costs, order, seed)
    busy: dict[str, float] = {}
    for node, took in zip(memgraph.nodes, seconds, strict=True):
        busy[node.lane] = busy.get(node.lane, 0.0) + took
    return Simulation(
        makespan=max((end for *_, end in timeline), default=0.0),
        busy=busy,
        bound=_find_bound(memgraph, seconds, busy, costs),
        timeline=timeline,
    )


def least_seconds(graph: TaskGraph, costs: Costs) -> float:
    """Seconds of the work of the busiest lane, without copies."""
    busy: dict[tuple[str, int], float] = {}
    for task in graph.tasks:
        key = task.lane, task.device
        busy[key] = busy.get(key, 0.0) + costs.of_task(task) / _workers(task.lane, costs)
    return max(busy.values(), default=0.0)


def least_seconds_with(
    graph: TaskGraph, costs: Costs, resident: Collection[int], homes: Mapping[int, Place]
) -> float:
    """Seconds of the busiest lane, with the copies that every plan with these residents needs.

    Every buffer that is not resident begins a step on the host. If a device reads it before it is
    overwritten, it is copied there once at least. If a device writes it last, it is copied back."""
    seconds: dict[tuple[str, int], float] = {}
    home_devices = graph.home_devices()
    for b, (first_reads, last_writes) in _first_and_last_uses(graph).items():
        buffer, home = graph.buffers[b], homes.get(b)
        on_host = b not in resident if home is None else home.arena == HOST
        if not on_host:
            continue
        kinds = [RELOAD] if first_reads else []
        kinds += [OFFLOAD] if last_writes and buffer.persistent else []
        for kind in kinds:
            key = kind, home_devices[b]
            seconds[key] = seconds.get(key, 0.0) + costs.of_copy(kind, buffer.nbytes)
    return max(least_seconds(graph, costs), *seconds.values(), 0.0)


def _first_and_last_uses(graph: TaskGraph) -> dict[int, tuple[bool, bool]]:
    """By buffer that exists before a step: whether its first task reads it on a device, and
    whether the last task that writes it does so on a device."""
    uses: dict[int, tuple[bool, bool]] = {}
    for task in graph.tasks:
        on_device = task.lane != "host"
        for b in task.touches:
            buffer = graph.buffers[b]
            if not buffer.persistent and buffer.role is not Role.INPUT:
                continue
            first, last = uses.get(b, (on_device and b in task.reads, False))
            uses[b] = first, on_device if b in task.writes else last
    return uses


def node_seconds(memgraph: MemGraph, costs: Costs) -> list[float]:
    tasks = memgraph.graph.tasks
    return [
        costs.of_task(tasks[node.task])
        if node.kind == TASK
        else costs.of_copy(node.kind, node.nbytes)
        for node in memgraph.nodes
    ]


def _workers(lane: str, costs: Costs) -> int:
    return costs.host_workers if lane == "host" else 1


@dataclass(slots=True, eq=False)
class _SimulatedLane:
    """The ready nodes of one lane, by rank, and how many more it can take now."""

    name: str
    free: int
    ready: list[tuple[int, int]] = field(default_factory=list)
    queue: deque[int] = field(default_factory=deque)
    """Its nodes that have not started, in order."""

    def next(self, in_order: bool) -> int | None:
        if not self.free or not self.ready or (in_order and self.ready[0][1] != self.queue[0]):
            return None
        self.free -= 1
        if in_order:
            self.queue.popleft()
        return heappop(self.ready)[1]


def _run(memgraph: MemGraph, seconds: list[float], costs: Costs, order: str, seed: int) -> Timeline:
    """Run all nodes. Returns (node, lane, start, end) of each."""
    nodes = memgraph.nodes
    rank = list(range(len(nodes)))
    if order == "random":
        # A random rank for each node is as good as a draw at every turn, and cheaper.
        rank = np.random.default_rng(seed).permutation(len(nodes)).tolist()
    lanes = {node.lane: _SimulatedLane(node.lane, _workers(node.lane, costs)) for node in nodes}
    successors: list[list[int]] = [[] for _ in nodes]
    waits = [len(node.deps) for node in nodes]
    for number, node in enumerate(nodes):
        lanes[node.lane].queue.append(number)
        if not node.deps:
            heappush(lanes[node.lane].ready, (rank[number], number))
        for dep in node.deps:
            successors[dep].append(number)

    now = 0.0
    running: list[tuple[float, int]] = []
    timeline: list[tuple[int, str, float, float]] = []
    flows = Flows(costs)
    shares = [_shares(node, costs) for node in nodes]
    rows: dict[int, int] = {}
    """By running flow: its row in the timeline."""

    def move_ends(changed: Iterable[tuple[int, float]]) -> None:
        for number, end in changed:
            name, start = timeline[rows[number]][1:3]
            timeline[rows[number]] = (number, name, start, end)
            heappush(running, (end, number))

    while True:
        for lane in lanes.values():
            while (number := lane.next(order == "in_order")) is not None:
                took = seconds[number]
                heappush(running, (now + took, number))
                timeline.append((number, lane.name, now, now + took))
                if shares[number]:
                    rows[number] = len(timeline) - 1
                    nbytes = flow_bytes(nodes[number], memgraph.graph)
                    move_ends(flows.begin(number, lane.name, nbytes, took, now))
        if not running:
            return tuple(timeline)
        now = running[0][0]
        # All nodes that end now come before any choice.
        while running and running[0][0] == now:
            _, done = heappop(running)
            if shares[done]:
                if done not in rows or timeline[rows[done]][3] != now:
                    continue  # its end has changed in the meantime
                del rows[done]
                move_ends(flows.end(done, now))
            lanes[nodes[done].lane].free += 1
            for later in successors[done]:
                waits[later] -= 1
                if not waits[later]:
                    heappush(lanes[nodes[later].lane].ready, (rank[later], later))


def _shares(node: Node, costs: Costs) -> bool:
    """Whether others may slow a node down."""
    if costs.topology is not None:
        return node.kind != TASK or node.lane == "host"
    return node.kind != TASK and costs.shared < 1


def _find_bound(
    memgraph: MemGraph, seconds: list[float], busy: Mapping[str, float], costs: Costs
) -> Bound:
    parts = {lane: work / _workers(lane, costs) for lane, work in busy.items()}
    ends: list[float] = []
    for node, took in zip(memgraph.nodes, seconds, strict=True):
        ends.append(took + max((ends[dep] for dep in node.deps), default=0.0))
    parts[CRITICAL_PATH] = max(ends, default=0.0)
    if costs.shared < 1:
        both = [(work, busy.get(other_way(e), 0.0)) for e, work in busy.items() if e[:3] == "h2d"]
        # Both run at once as long as both have work, or else one after the other.
        slower = min(1.0, 1 / costs.shared - 1)
        links = [max(pair) + min(pair) * slower for pair in both]
        parts[LINK] = max(links, default=0.0)
    for name, work in _work_of_shared(memgraph, costs).items():
        parts[name] = max(work, parts.get(name, 0.0))
    lane = max(parts, key=lambda part: parts[part])
    return Bound(parts[lane], lane, parts)


def _work_of_shared(memgraph: MemGraph, costs: Costs) -> dict[str, float]:
    """Seconds that what is shared needs for all bytes that go over it."""
    by_lane: dict[str, int] = {}
    for node in memgraph.nodes:
        if costs.topology is not None and _shares(node, costs):
            nbytes = flow_bytes(node, memgraph.graph)
            by_lane[node.lane] = by_lane.get(node.lane, 0) + nbytes
    seconds: dict[str, float] = {}
    for lane, nbytes in by_lane.items():
        for name, rate, times in Route.of_lane(lane, costs).uses:
            seconds[name] = seconds.get(name, 0.0) + times * nbytes / rate
    return seconds
