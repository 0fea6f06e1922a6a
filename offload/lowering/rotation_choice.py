"""Chooses on paper the updates that wait for the next forward pass: the earliest deadline first.

    compute   B6   B5   B4   B3   B2   B1  |  F1   F2   F3   F4   F5   F6
    updates        6------5------3------2--|--1------4------
                   ready when the gradient is, due when the next forward pass reads the weight

Among the updates that are ready, the one that is due first runs first: that of the layer which the
backward pass has just left. So the host is never idle, the updates that remain are spread over the
layers, and each has time until its own layer is due. Those that begin after the backward pass are
late.

`pace` stretches the seconds of backward and forward, because copies may slow them down. Only
updates on the host can be late: an update on the device takes the device's time wherever it runs.
"""

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace

from offload.graph.costs import Costs
from offload.graph.taskgraph import TaskGraph
from offload.lowering.rotation import Rotation, rotated, updates_of

PACES = (1.0, 0.8, 1.3)


def rotations(graphs: Sequence[tuple[str, TaskGraph]], costs: Costs) -> list[tuple[str, Rotation]]:
    """The rotations of these graphs that are worth trying, with names."""
    found: list[tuple[str, Rotation]] = []
    for name, graph in graphs:
        for chosen in late_choices(graph, costs):
            rotation = rotated(graph, chosen)
            if rotation is not None:
                what = f"{rotation.late} of {rotation.updates} updates in the next forward pass"
                found.append((f"{name}, {what}", rotation))
    return found


def late_choices(graph: TaskGraph, costs: Costs) -> Iterator[frozenset[int]]:
    """Different sets of late updates that are worth trying."""
    seen = {frozenset[int]()}
    for pace in PACES:
        chosen = late_at(graph, costs, pace)
        if chosen not in seen:
            seen.add(chosen)
            yield chosen


def late_at(graph: TaskGraph, costs: Costs, pace: float = 1.0) -> frozenset[int]:
    updates = {n for n in updates_of(graph) if graph.tasks[n].lane == "host"}
    starts, end = _clock(graph, costs, pace, updates)
    due = _due(graph, starts, end)
    ready = _ready(graph, costs, starts, pace, updates)
    waiting = sorted(updates, key=lambda n: (ready[n], n))
    free = [0.0] * max(1, costs.host_workers)
    heapify(free)
    late: set[int] = set()
    at_hand: list[tuple[float, int]] = []
    waiting.reverse()
    while waiting or at_hand:
        now = free[0] if at_hand else max(free[0], ready[waiting[-1]])
        while waiting and ready[waiting[-1]] <= now:
            number = waiting.pop()
            own = [b for b in graph.tasks[number].writes if b in due]
            heappush(at_hand, (min((due[b] for b in own), default=2 * end), number))
        _, number = heappop(at_hand)
        if now >= end:
            late.add(number)
        heapreplace(free, now + costs.of_task(graph.tasks[number]))
    return frozenset(late)


def _clock(
    graph: TaskGraph, costs: Costs, pace: float, updates: set[int]
) -> tuple[list[float], float]:
    """When each task begins if the device never waits, and when the last one ends."""
    starts, now = [], 0.0
    for number, task in enumerate(graph.tasks):
        starts.append(now)
        if task.lane == "compute" and number not in updates:
            now += pace * costs.of_task(task)
    return starts, now


def _due(graph: TaskGraph, starts: list[float], end: float) -> dict[int, float]:
    """When the next step first reads each buffer."""
    due: dict[int, float] = {}
    for number, task in enumerate(graph.tasks):
        for b in task.reads:
            if graph.buffers[b].persistent:
                due.setdefault(b, end + starts[number])
    return due


def _ready(
    graph: TaskGraph, costs: Costs, starts: list[float], pace: float, updates: set[int]
) -> list[float]:
    """When the inputs of each update are ready. Updates of one parameter do not wait for each
    other."""
    ends: list[float] = []
    ready: list[float] = []
    for number, needed in enumerate(graph.dependencies()):
        before = [d for d in needed if d not in updates]
        ready.append(max((ends[d] for d in before), default=0.0))
        task = graph.tasks[number]
        begins = max(ready[number], starts[number]) if task.lane == "compute" else ready[number]
        ends.append(begins + pace * costs.of_task(task))
    return ready
