"""Spreads a step over several devices. Pure.

    device 0   F0 F1 | f0 f1 | . . . . B1 B0 | b1 b0        layers 0 and 1, their weights and states
    device 1         | F2 F3 | f2 f3 B3 B2 | b3 b2          layers 2 and 3

The forward tasks of the first micro-batch are cut where the fewest bytes go on, into chunks of
about equally many seconds; chunk c is of device c mod k. What outlives the step has its home where
it is read first, and what one update changes together has one home. A task that changes such a
buffer runs at its home, another one where most of what it reads is. So every sum is made on one
device, in the order of the micro-batches: all bits are those of one device.

The tasks are then listed in the order in which the devices would begin them, because a plan is made
in the order of the list.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import accumulate

from offload.errors import GraphError
from offload.graph.costs import Costs
from offload.graph.taskgraph import BACKWARD, FORWARD, UPDATE, Role, Task, TaskGraph

SLACK = 0.3
"""By how much of a chunk's seconds its end may be elsewhere, so that less goes on there."""
FIRST = (UPDATE, BACKWARD, FORWARD)
"""What a device does first: what frees the most."""


def place_tasks(graph: TaskGraph, devices: int, costs: Costs, chunks: int = 1) -> TaskGraph:
    """The same step on so many devices, or on as many as it can be cut for. `chunks`: of each
    device."""
    if devices < 1:
        raise GraphError(f"devices={devices}: give 1 or more")
    if devices == 1:
        return graph
    if len(graph.devices) > 1:
        raise GraphError(f"devices={devices}: the tasks name devices {graph.devices} already")
    placed = graph.with_tasks(
        [
            replace(task, device=device)
            for task, device in zip(
                graph.tasks, _devices(graph, devices, costs, chunks), strict=True
            )
        ]
    )
    placed.check()
    order = list(_list_schedule(placed, costs))
    used = len(placed.devices)
    fewer = f" of {devices} asked, because it cannot be cut further" if used < devices else ""
    on = "1 device" if used == 1 else f"{used} devices"
    return placed.reorder(order, f"placed on {on}{fewer}")


def _devices(graph: TaskGraph, devices: int, costs: Costs, chunks: int) -> list[int]:
    """The device of every task."""
    homes = _find_homes(graph, _cut_forward(graph, devices, costs, chunks))
    at = dict(homes)
    """Where the newest content of each buffer was made."""
    placed: list[int] = []
    for task in graph.tasks:
        device = _device_of(graph, task, homes, at, placed[-1] if placed else 0)
        placed.append(device)
        at.update(dict.fromkeys(task.writes, device))
    return placed


def _device_of(
    graph: TaskGraph, task: Task, homes: dict[int, int], at: dict[int, int], before: int
) -> int:
    """What outlives the step is changed at its one home, a sum at the home of most of its bytes."""
    kept = {homes[b] for b in task.writes if graph.buffers[b].persistent and b in homes}
    if kept:
        (home,) = kept
        return home
    homes_of_sums = {b: homes[b] for b in task.writes if b in homes}
    where = homes_of_sums or {b: at[b] for b in task.reads if b in at}
    weight: dict[int, int] = {}
    for b, device in where.items():
        weight[device] = weight.get(device, 0) + graph.buffers[b].nbytes
    return max(weight, key=lambda d: (weight[d], d == before), default=before)


# ---- where what outlives the step has its home --------------------------------------------------


def _find_homes(graph: TaskGraph, forward: dict[int, int]) -> dict[int, int]:
    """The device of each buffer that outlives the step or sums up over micro-batches. `forward`:
    the devices of the forward tasks of the first micro-batch."""
    together = _Groups(len(graph.buffers))
    read: dict[int, int] = {}
    for number, task in enumerate(graph.tasks):
        kept = [
            b
            for b in task.writes
            if graph.buffers[b].persistent
            or (b in task.reads and graph.buffers[b].role is Role.GRADIENT)
        ]
        for b in kept[1:]:
            together.join(kept[0], b)
        for b in task.touches if number in forward else ():
            if graph.buffers[b].persistent or graph.buffers[b].role is Role.INPUT:
                read.setdefault(b, forward[number])
        if task.phase == UPDATE and kept:
            for b in task.reads:
                if b not in kept and graph.buffers[b].role is Role.GRADIENT:
                    together.join(kept[0], b)
    homes: dict[int, int] = {}
    for b, device in read.items():
        homes.setdefault(together.first(b), device)
    return {
        b: homes[together.first(b)]
        for b in range(len(graph.buffers))
        if together.first(b) in homes and graph.buffers[b].role is not Role.INPUT
    }


class _Groups:
    """Which buffers have one home."""

    def __init__(self, count: int) -> None:
        self._above = list(range(count))

    def first(self, b: int) -> int:
        while self._above[b] != b:
            self._above[b] = self._above[self._above[b]]
            b = self._above[b]
        return b

    def join(self, a: int, b: int) -> None:
        a, b = sorted((self.first(a), self.first(b)))
        self._above[b] = a


# ---- chunks -------------------------------------------------------------------------------------


def _cut_forward(graph: TaskGraph, devices: int, costs: Costs, chunks: int) -> dict[int, int]:
    """The device of each forward task of the first micro-batch."""
    forward = [n for n, t in enumerate(graph.tasks) if t.turn == 0 and t.phase == FORWARD]
    seconds = [costs.of_task(graph.tasks[n]) for n in forward]
    crossing = _bytes_that_go_on(graph, forward)
    until = [0.0, *accumulate(seconds)]
    share = until[-1] / (devices * chunks)
    ends: list[int] = []
    for number in range(1, devices * chunks):
        first = ends[-1] + 1 if ends else 1
        near = [at for at in range(first, len(forward)) if abs(until[at] / share - number) < SLACK]
        if near:
            ends.append(
                min(near, key=lambda at: (crossing[at - 1], abs(until[at] / share - number)))
            )
    placed: dict[int, int] = {}
    chunk = 0
    for place, number in enumerate(forward):
        while chunk < len(ends) and place >= ends[chunk]:
            chunk += 1
        placed[number] = chunk % devices
    return placed


def _bytes_that_go_on(graph: TaskGraph, tasks: Sequence[int]) -> list[int]:
    """After each of these tasks: the bytes that they have made and that a later one reads."""
    made: dict[int, int] = {}
    last: dict[int, int] = {}
    for place, number in enumerate(tasks):
        for b in graph.tasks[number].writes:
            if not graph.buffers[b].persistent:
                made.setdefault(b, place)
        for b in graph.tasks[number].reads:
            last[b] = place
    change = [0] * (len(tasks) + 1)
    for b, place in made.items():
        if last.get(b, -1) > place:
            change[place] += graph.buffers[b].nbytes
            change[last[b]] -= graph.buffers[b].nbytes
    crossing: list[int] = []
    now = 0
    for place in range(len(tasks)):
        now += change[place]
        crossing.append(now)
    return crossing


# ---- the order ----------------------------------------------------------------------------------


def _list_schedule(graph: TaskGraph, costs: Costs) -> Iterator[int]:
    """The tasks in the order in which the devices would begin them if copies took no time."""
    needed = graph.dependencies()
    waits = [len(before) for before in needed]
    after: list[list[int]] = [[] for _ in needed]
    for number, before in enumerate(needed):
        for other in before:
            after[other].append(number)
    ready: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
    running: list[tuple[float, int]] = []
    busy: set[tuple[str, int]] = set()
    now = 0.0

    def lane(number: int) -> tuple[str, int]:
        return graph.tasks[number].lane, graph.tasks[number].device

    def push(number: int) -> None:
        task = graph.tasks[number]
        heappush(ready.setdefault(lane(number), []), (FIRST.index(task.phase), task.turn, number))

    for number, count in enumerate(waits):
        if not count:
            push(number)
    while True:
        for which, heap in ready.items():
            if heap and which not in busy:
                number = heappop(heap)[2]
                busy.add(which)
                heappush(running, (now + costs.of_task(graph.tasks[number]), number))
                yield number
        if not running:
            return
        now, number = heappop(running)
        busy.discard(lane(number))
        for later in after[number]:
            waits[later] -= 1
            if not waits[later]:
                push(later)
