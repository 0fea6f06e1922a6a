"""Lists the tasks of several devices in the order in which these would begin them. Pure.

    one lap    device 0   F0 F1 F2 F3 . . . . B0 F4 B1 F5 B2 F6      a device holds so many
               device 1      F0 F1 F2 . . B0 F3 B1 F4 B2 F5          micro-batches that it is busy
               device 2         F0 F1 B0 F2 B1 F3 B2 F4              until the first one comes back

    two laps   device 0   F0 F1 F2 f0 f1 f2 . . b0 F3 b1 F4 b2 F5 B0 f3 ...     f, b: the second lap

A plan is made in the order of its tasks, so this decides what the devices do at the same time. The
micro-batches of a group go round together: all of them through a chunk, then through the device's
next one. With more laps the devices wait less for the first micro-batch and for the last one, and
with larger groups the gradients of late layers are complete earlier, so that updates of the host
run beside what is left. In return there is more to hold.
"""

from collections.abc import Iterator, Mapping
from heapq import heappop, heappush
from math import inf

from offload.graph.costs import Costs
from offload.graph.taskgraph import BACKWARD, FORWARD, HOST, UPDATE, Task, TaskGraph
from offload.lowering.fitting_states import bytes_beside_states

FIRST = (UPDATE, FORWARD, BACKWARD)
"""What a device does first. Others wait for its forward tasks, and it holds only so many."""
TOGETHER = (4, 2, 1)
"""Sizes of groups, in micro-batches for each device."""
Unit = tuple[int, int, int]
"""A group, a lap in the order of a pass, and a micro-batch: the order on each device."""


def list_device_orders(
    graph: TaskGraph, costs: Costs, limits: Mapping[int, int]
) -> list[tuple[str, TaskGraph]]:
    """The same step in orders of its devices, with names: with large groups, then with smaller
    ones. `limits`: bytes of devices. If the smallest groups do not fit, devices hold less."""
    sizes = list_groups(graph)
    ordered = [graph.reorder(_order(graph, costs, group, 2)) for group in sizes]
    room = sum(limits.get(device, inf) for device in graph.devices)
    if sum(bytes_beside_states(ordered[-1]).values()) > room:
        ordered[-1] = graph.reorder(_order(graph, costs, sizes[-1], 1))
    names = [f"{group} micro-batches go round together" for group in sizes]
    return list(zip(names, ordered, strict=True))


def list_groups(graph: TaskGraph) -> list[int]:
    """How many micro-batches may go round together, from many to few."""
    if not any(task.lap for task in graph.tasks):
        return [1]  # they go round once, so no others wait for them
    turns = 1 + max(task.turn for task in graph.tasks)
    return sorted({min(turns, many * len(graph.devices)) for many in TOGETHER}, reverse=True)


def _order(graph: TaskGraph, costs: Costs, group: int, spare: int) -> list[int]:
    return [number for number, _ in schedule_tasks(graph, costs, group, spare)]


def schedule_tasks(
    graph: TaskGraph, costs: Costs, group: int, spare: int
) -> Iterator[tuple[int, float]]:
    """The tasks in the order in which the devices would begin them if copies took no time of
    anybody, and when they end. `spare`: how many micro-batches a device may hold more than the
    device behind it."""
    tasks, needed = graph.tasks, graph.dependencies()
    units = [_unit_of(task, group) for task in tasks]
    waits = [len(before) for before in needed]
    after: list[list[int]] = [[] for _ in needed]
    for number, before in enumerate(needed):
        for other in before:
            after[other].append(number)
    for number, later in _list_holds(graph, units, group, spare):
        after[number].append(later)
        waits[later] += 1
    ready: dict[tuple[str, int], list[tuple[int, Unit, int]]] = {}
    running: list[tuple[float, int, bool]] = []
    """A heap: when a task ends, or when all that it reads is on its device."""
    busy: set[tuple[str, int]] = set()
    there = [0.0] * len(tasks)
    """When all that a task reads is on its device."""
    now = 0.0

    def lane(number: int) -> tuple[str, int]:
        task = tasks[number]
        return task.lane, HOST if task.lane == "host" else task.device

    def arrive(number: int) -> None:
        rank = FIRST.index(tasks[number].phase)
        heappush(ready.setdefault(lane(number), []), (rank, units[number], number))

    for number, count in enumerate(waits):
        if not count:
            arrive(number)
    while True:
        for which, heap in ready.items():
            if heap and which not in busy:
                number = heappop(heap)[2]
                busy.add(which)
                end = now + costs.of_task(tasks[number])
                heappush(running, (end, number, True))
                yield number, end
        if not running:
            return
        now, number, ended = heappop(running)
        if not ended:
            arrive(number)
            continue
        busy.discard(lane(number))
        for later in after[number]:
            there[later] = max(there[later], now + _send_seconds(graph, costs, number, later))
            waits[later] -= 1
            if not waits[later] and there[later] > now:
                heappush(running, (there[later], later, False))
            elif not waits[later]:
                arrive(later)


def _unit_of(task: Task, group: int) -> Unit:
    lap = -task.lap if task.phase == BACKWARD else task.lap
    return task.turn // group, lap, task.turn


def _list_holds(
    graph: TaskGraph, units: list[Unit], group: int, spare: int
) -> Iterator[tuple[int, int]]:
    """Pairs of tasks: the second one waits for the first one, because a device holds only so many
    micro-batches. It waits for older ones alone, so there is always something that can run."""
    passes: dict[tuple[int, str], dict[Unit, list[int]]] = {}
    for number, task in enumerate(graph.tasks):
        passes.setdefault((task.device, task.phase), {}).setdefault(units[number], []).append(
            number
        )
    laps = 1 + max((task.lap for task in graph.tasks), default=0)
    for behind, device in enumerate(reversed(graph.devices), 1):
        forward, backward = (passes.get((device, phase), {}) for phase in (FORWARD, BACKWARD))
        held = spare * behind + (laps - 1) * group
        for first, later in zip(sorted(backward), sorted(forward)[held:], strict=False):
            if first[-1] < later[-1]:
                yield from ((a, b) for a in backward[first] for b in forward[later])


def _send_seconds(graph: TaskGraph, costs: Costs, number: int, later: int) -> float:
    """How long it takes until a task has what another one has written."""
    maker, reader = graph.tasks[number], graph.tasks[later]
    if maker.device == reader.device:
        return 0.0
    nbytes = sum(graph.buffers[b].nbytes for b in maker.writes if b in reader.reads)
    return costs.of_copy("send", nbytes) if nbytes else 0.0
