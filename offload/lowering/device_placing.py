"""Spreads a step over several devices. Pure.

    device 0   F0 F1 | f0 f1 | . . . . B1 B0 | b1 b0        layers 0 and 1, their weights and states
    device 1         | F2 F3 | f2 f3 B3 B2 | b3 b2          layers 2 and 3

The forward tasks of the first micro-batch are cut where the fewest bytes go on, into chunks of
about equally many seconds; chunk c is of device c mod k. What outlives the step has its home where
it is read first, and what one update changes together has one home. A task that changes such a
buffer runs at its home, another one where most of what it reads is. So every sum is made on one
device, in the order of the micro-batches: all bits are those of one device.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, product

from offload.errors import GraphError
from offload.graph.costs import Costs
from offload.graph.taskgraph import FORWARD, UPDATE, Role, Task, TaskGraph

SLACK = 0.45
"""By how much of a chunk's seconds its end may be elsewhere, so that less goes on there."""
SEEN = 0.1
"""The share of a copy's seconds that other work does not hide."""


def place_tasks(graph: TaskGraph, devices: int, costs: Costs, chunks: int = 1) -> TaskGraph:
    """The same step on so many devices, or on as many as it can be cut for. `chunks`: of each
    device."""
    if devices < 1:
        raise GraphError(f"devices={devices}: give 1 or more")
    if devices == 1:
        return graph
    if len(graph.devices) > 1:
        raise GraphError(f"devices={devices}: the tasks name devices {graph.devices} already")
    chosen = _devices(graph, devices, costs, chunks)
    tasks = [replace(task, device=d) for task, d in zip(graph.tasks, chosen, strict=True)]
    used = len({*chosen})
    fewer = f" of {devices} asked, because it cannot be cut further" if used < devices else ""
    on = "1 device" if used == 1 else f"{used} devices"
    placed = graph.with_tasks(tasks, None, f"placed on {on}{fewer}")
    placed.check()
    return placed


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
    sends = [SEEN * costs.of_copy("send", nbytes) for nbytes in crossing]
    ends = _balance([0.0, *accumulate(seconds)], sends, devices, chunks)
    placed: dict[int, int] = {}
    chunk = 0
    for place, number in enumerate(forward):
        while chunk < len(ends) and place >= ends[chunk]:
            chunk += 1
        placed[number] = chunk % devices
    return placed


def _balance(
    until: Sequence[float], sends: Sequence[float], devices: int, chunks: int
) -> list[int]:
    """Where each chunk but the last one ends: near its share, and so that the fullest device has
    the least to do. `until`: the seconds before each place; `sends`: what a cut after it costs."""
    count, share = devices * chunks, until[-1] / (devices * chunks)
    near = [
        [at for at in range(1, len(sends)) if abs(until[at] / share - number) < SLACK]
        for number in range(1, count)
    ]
    near = [places for places in near if places]

    def work(ends: Sequence[int]) -> list[float]:
        """The seconds of each device, the largest first."""
        seconds = [0.0] * devices
        for chunk, (start, end) in enumerate(pairwise((0, *ends, len(sends)))):
            seconds[chunk % devices] += until[end] - until[start] + sends[end - 1]
        return sorted(seconds, reverse=True)

    ends = [places[len(places) // 2] for places in near]
    least: list[float] = []
    while work(ends) != least:
        least = work(ends)
        for n, places in enumerate(near):
            ends = min(([*ends[:n], at, *ends[n + 1 :]] for at in places), key=work)
        for n, places in enumerate(pairwise(near)):
            ends = min(([*ends[:n], *two, *ends[n + 2 :]] for two in product(*places)), key=work)
    return ends


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
