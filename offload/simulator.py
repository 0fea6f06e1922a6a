"""How long a MemGraph takes on a machine of given rates, and what no order could beat. Pure.

    h2d      R w1 | R w2 |      | R w3 |         an engine that is free takes at once what is ready:
    compute       |  F1  |  F2  |      |  F3     work-conserving, by number ("priority")

Engines run one node at a time, the host as many as it has workers. The two directions of a link
slow each other down where `Costs.shared` says so. A step lasts at least as long as its longest path
of nodes, and as the work of its busiest engine (`Bound`).

A step that offloads forwards and reloads backwards cannot fill both directions at once: its
two phases, before and after the fullest moment, add up. `two_phase` is that estimate.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Protocol

import numpy as np

from offload.costs import Costs
from offload.memgraph import TASK, MemGraph
from offload.taskgraph import TaskGraph

_End = tuple[int, float]
CRITICAL_PATH, LINK = "critical path", "link"


class HasMemGraph(Protocol):
    """A plan."""

    @property
    def memgraph(self) -> MemGraph: ...


@dataclass(frozen=True, slots=True)
class Bound:
    """No order is faster than `seconds`."""

    seconds: float
    engine: str
    """What sets it: one of `parts`."""
    parts: Mapping[str, float]
    """Each engine's work (of the host, a worker's share), the critical path, and of a link whose
    directions share its rate the work of both."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """One run of a step."""

    makespan: float
    busy: Mapping[str, float]
    """Seconds of work of each engine; of the host, of all its workers together."""
    bound: Bound
    two_phase: float
    timeline: tuple[tuple[int, str, float, float], ...]
    """Node, engine, start, end: in the order in which they started."""


def simulate(
    plan: MemGraph | HasMemGraph, costs: Costs, order: str = "priority", seed: int = 0
) -> Simulation:
    """Run it on paper. `order`: priority, an idle engine takes the ready node of lowest number;
    random, any that is ready; in_order, only the next one of its own, as a queue would."""
    if order not in ("priority", "random", "in_order"):
        raise ValueError(f"order is {order!r}: priority, random or in_order")
    memgraph = plan if isinstance(plan, MemGraph) else plan.memgraph
    seconds = _seconds(memgraph, costs)
    timeline = _run(memgraph, seconds, costs, order, seed)
    busy: dict[str, float] = {}
    for node, took in zip(memgraph.nodes, seconds, strict=True):
        busy[node.engine] = busy.get(node.engine, 0.0) + took
    bound = _bound(memgraph, seconds, busy, costs)
    return Simulation(
        makespan=max((end for *_, end in timeline), default=0.0),
        busy=busy,
        bound=bound,
        two_phase=max(bound.seconds, _two_phase(memgraph, seconds, costs)),
        timeline=timeline,
    )


def least_seconds(graph: TaskGraph, costs: Costs) -> float:
    """Of its tasks alone, on the engine that has most to do."""
    busy: dict[tuple[str, int], float] = {}
    for task in graph.tasks:
        key = task.engine, task.device
        busy[key] = busy.get(key, 0.0) + costs.of_task(task) / _workers(task.engine, costs)
    return max(busy.values(), default=0.0)


def _seconds(memgraph: MemGraph, costs: Costs) -> list[float]:
    tasks = memgraph.graph.tasks
    return [
        costs.of_task(tasks[node.task])
        if node.kind == TASK
        else costs.of_copy(node.kind, node.nbytes)
        for node in memgraph.nodes
    ]


def _workers(engine: str, costs: Costs) -> int:
    return costs.host_workers if engine == "host" else 1


@dataclass(slots=True, eq=False)
class _Engine:
    """What is ready for it, by rank, and how many more nodes it takes now."""

    name: str
    free: int
    ready: list[tuple[int, int]] = field(default_factory=list)
    queue: deque[int] = field(default_factory=deque)
    """In order: its nodes that have not started."""

    def next(self, in_order: bool) -> int | None:
        if not self.free or not self.ready or (in_order and self.ready[0][1] != self.queue[0]):
            return None
        self.free -= 1
        if in_order:
            self.queue.popleft()
        return heappop(self.ready)[1]


@dataclass(slots=True, eq=False)
class _Links:
    """The copies that run now. What one direction has left is stretched while the other copies."""

    shared: float
    left: dict[str, tuple[int, float, float, float]] = field(default_factory=dict)
    """By engine: the node, seconds that are left of it by itself, since when, and its pace."""

    def begin(self, engine: str, node: int, seconds: float, now: float) -> Iterator[_End]:
        """(node, when it ends) of every copy whose end is another now."""
        other = other_way(engine)
        self.left[engine] = (node, seconds, now, 1.0)
        if other in self.left:
            yield self._at(engine, now, self.shared)
            yield self._at(other, now, self.shared)

    def end(self, engine: str, now: float) -> Iterator[_End]:
        del self.left[engine]
        other = other_way(engine)
        if other in self.left:
            yield self._at(other, now, 1.0)

    def _at(self, engine: str, now: float, pace: float) -> _End:
        node, seconds, since, before = self.left[engine]
        seconds -= (now - since) * before
        self.left[engine] = (node, seconds, now, pace)
        return node, now + seconds / pace


def other_way(engine: str) -> str:
    """The engine of a link's other direction."""
    return ("d2h" if engine.startswith("h2d") else "h2d") + engine[3:]


def _run(
    memgraph: MemGraph, seconds: list[float], costs: Costs, order: str, seed: int
) -> tuple[tuple[int, str, float, float], ...]:
    """(node, engine, start, end) of each."""
    nodes = memgraph.nodes
    rank = list(range(len(nodes)))
    if order == "random":
        # Whoever is ready may come first: as good as a draw at every turn, and cheaper.
        rank = np.random.default_rng(seed).permutation(len(nodes)).tolist()
    engines = {node.engine: _Engine(node.engine, _workers(node.engine, costs)) for node in nodes}
    successors: list[list[int]] = [[] for _ in nodes]
    waits = [len(node.deps) for node in nodes]
    for number, node in enumerate(nodes):
        engines[node.engine].queue.append(number)
        if not node.deps:
            heappush(engines[node.engine].ready, (rank[number], number))
        for dep in node.deps:
            successors[dep].append(number)

    now = 0.0
    running: list[tuple[float, int]] = []
    timeline: list[tuple[int, str, float, float]] = []
    links = _Links(costs.shared)
    copies = {n for n, node in enumerate(nodes) if node.kind != TASK} if costs.shared < 1 else ()
    rows: dict[int, int] = {}
    """Of the copies that run: where they stand in the timeline."""

    def moved(number: int, end: float) -> None:
        name, start = timeline[rows[number]][1:3]
        timeline[rows[number]] = (number, name, start, end)
        heappush(running, (end, number))

    while True:
        for engine in engines.values():
            while (number := engine.next(order == "in_order")) is not None:
                end = now + seconds[number]
                timeline.append((number, engine.name, now, end))
                heappush(running, (end, number))
                if number in copies:
                    rows[number] = len(timeline) - 1
                    for node, then in links.begin(engine.name, number, seconds[number], now):
                        moved(node, then)
        if not running:
            return tuple(timeline)
        now = running[0][0]
        # All that end now, before anybody chooses.
        while running and running[0][0] == now:
            _, done = heappop(running)
            if done in copies:
                if done not in rows or timeline[rows[done]][3] != now:
                    continue  # its end is another by now
                del rows[done]
                for node, then in links.end(nodes[done].engine, now):
                    moved(node, then)
            engines[nodes[done].engine].free += 1
            for later in successors[done]:
                waits[later] -= 1
                if not waits[later]:
                    heappush(engines[nodes[later].engine].ready, (rank[later], later))


def _bound(
    memgraph: MemGraph, seconds: list[float], busy: Mapping[str, float], costs: Costs
) -> Bound:
    parts = {engine: work / _workers(engine, costs) for engine, work in busy.items()}
    ends: list[float] = []
    for node, took in zip(memgraph.nodes, seconds, strict=True):
        ends.append(took + max((ends[dep] for dep in node.deps), default=0.0))
    parts[CRITICAL_PATH] = max(ends, default=0.0)
    if costs.shared < 1:
        both = [(work, busy.get(other_way(e), 0.0)) for e, work in busy.items() if e[:3] == "h2d"]
        # Side by side as long as both have something to do, or one after the other.
        slower = min(1.0, 1 / costs.shared - 1)
        links = [max(pair) + min(pair) * slower for pair in both]
        parts[LINK] = max(links, default=0.0)
    engine = max(parts, key=lambda part: parts[part])
    return Bound(parts[engine], engine, parts)


def _two_phase(memgraph: MemGraph, seconds: list[float], costs: Costs) -> float:
    """The busiest engine's work up to the fullest moment, and the busiest's after it."""
    live = memgraph.graph.live_bytes()
    fullest = max(range(len(live)), key=lambda task: live[task], default=-1)
    phases: tuple[dict[str, float], dict[str, float]] = ({}, {})
    for node, took in zip(memgraph.nodes, seconds, strict=True):
        work = phases[node.task > fullest]
        work[node.engine] = work.get(node.engine, 0.0) + took / _workers(node.engine, costs)
    return sum(max(work.values(), default=0.0) for work in phases)
