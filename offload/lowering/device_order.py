"""Lists the tasks of several devices in the order in which these would begin them. Pure.

    device 0   F0 F1 F2 . . . . B0 F3 B1 F4 B2 . . .          three micro-batches at a time: F3
    device 1      F0 F1 F2 . B0 . B1 F3 B2 F4 . . .           begins when B0 has ended everywhere
    device 2         F0 B0 F1 B1 F2 B2 . . F3 B3 . .

A plan is made in the order of its tasks, so this decides what the devices do at the same time. A
device takes the ready task that frees most: updates, then backward before forward tasks, and the
older micro-batch first. What a micro-batch keeps for its backward pass is on the devices from its
first forward task on, so only so many are under way at a time: as many as keep all devices busy, or
as fit on all of them together: a full one moves some of it.
"""

from collections.abc import Iterator, Mapping
from heapq import heappop, heappush
from math import inf

from offload.graph.costs import Costs
from offload.graph.taskgraph import BACKWARD, FORWARD, UPDATE, TaskGraph
from offload.lowering.fitting_states import bytes_beside_states

FIRST = (UPDATE, BACKWARD, FORWARD)
"""What a device does first: what frees the most."""


def order_tasks(graph: TaskGraph, costs: Costs, limits: Mapping[int, int]) -> TaskGraph:
    """The same step in the order of its devices. `limits`: bytes of devices."""
    devices, room = len(graph.devices), sum(limits.get(d, inf) for d in graph.devices)
    for under_way in (2 * devices, 3 * devices // 2, devices):
        ordered = graph.reorder(list(_list_schedule(graph, costs, under_way)))
        if sum(bytes_beside_states(ordered).values()) <= room:
            break
    return ordered


def _list_schedule(graph: TaskGraph, costs: Costs, under_way: int) -> Iterator[int]:
    """The tasks in the order in which the devices would begin them if copies took no time."""
    tasks, needed = graph.tasks, graph.dependencies()
    waits = [len(before) for before in needed]
    after: list[list[int]] = [[] for _ in needed]
    left: dict[int, int] = {}
    """By micro-batch: its tasks that have not ended."""
    held: dict[int, list[int]] = {}
    """By micro-batch: the first tasks of the one that begins when it has ended."""
    for number, before in enumerate(needed):
        turn = tasks[number].turn
        for other in before:
            after[other].append(number)
        if tasks[number].phase != UPDATE:
            left[turn] = left.get(turn, 0) + 1
            if turn >= under_way and all(tasks[other].turn != turn for other in before):
                held.setdefault(turn - under_way, []).append(number)
                waits[number] += 1
    ready: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
    running: list[tuple[float, int, bool]] = []
    """A heap: when a task ends, or when all that it reads is on its device."""
    busy: set[tuple[str, int]] = set()
    there = [0.0] * len(tasks)
    """When all that a task reads is on its device."""
    now = 0.0

    def lane(number: int) -> tuple[str, int]:
        return tasks[number].lane, tasks[number].device

    def arrive(number: int) -> None:
        task = tasks[number]
        heappush(ready.setdefault(lane(number), []), (FIRST.index(task.phase), task.turn, number))

    for number, count in enumerate(waits):
        if not count:
            arrive(number)
    while True:
        for which, heap in ready.items():
            if heap and which not in busy:
                number = heappop(heap)[2]
                busy.add(which)
                heappush(running, (now + costs.of_task(tasks[number]), number, True))
                yield number
        if not running:
            return
        now, number, ended = heappop(running)
        if not ended:
            arrive(number)
            continue
        busy.discard(lane(number))
        free = after[number]
        if tasks[number].phase != UPDATE:
            left[tasks[number].turn] -= 1
            if not left[tasks[number].turn]:
                free = [*free, *held.get(tasks[number].turn, ())]
        for later in free:
            there[later] = max(there[later], now + _send_seconds(graph, costs, number, later))
            waits[later] -= 1
            if not waits[later] and there[later] > now:
                heappush(running, (there[later], later, False))
            elif not waits[later]:
                arrive(later)


def _send_seconds(graph: TaskGraph, costs: Costs, number: int, later: int) -> float:
    """How long it takes until a task has what another one has written."""
    maker, reader = graph.tasks[number], graph.tasks[later]
    if maker.device == reader.device:
        return 0.0
    nbytes = sum(graph.buffers[b].nbytes for b in maker.writes if b in reader.reads)
    return costs.of_copy("send", nbytes) if nbytes else 0.0
