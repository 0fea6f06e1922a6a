"""Cuts the forward passes of a step into chunks, one device after the other. Pure.

    device 0   c0      c2           with two laps, what a device has to do with each micro-batch
    device 1      c1      c3        is two chunks, and their seconds together are a device's share

A cut is where few bytes go on, and the devices have about equally many seconds. A backward task is
of the chunk whose weights and activations it reads, and its seconds count there.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import accumulate

from offload.graph.costs import Costs
from offload.graph.taskgraph import BACKWARD, FORWARD, Task, TaskGraph

SLACK = 0.45
"""By how much of a chunk's seconds its end may be elsewhere, so that less goes on there."""
SEEN = 0.1
"""The share of a copy's seconds that other work does not hide."""
USERS = 8
"""What more tasks of a forward pass touch, such as a mask, is of no layer."""
PLACES, CUTS = 32, 64
"""At most so many places are tried for the end of a chunk, behind the best so many ways to cut what
is before it."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A step in chunks."""

    chunk_of: Mapping[int, int]
    """By forward and backward task."""
    sent: Sequence[int]
    """Behind each chunk but the last one: the bytes that a micro-batch sends on."""


def cut_step(
    graph: TaskGraph, pairs: Mapping[int, int], devices: int, laps: int, costs: Costs
) -> Cut:
    """Cut the forward passes of all micro-batches. `pairs`: the forward tasks of backward ones,
    whose seconds count, too."""
    seconds_of = [costs.of_task(task) for task in graph.tasks]
    for backward, pair in pairs.items():
        seconds_of[pair] += seconds_of[backward]
    chunk_of: dict[int, int] = {}
    known: dict[tuple[tuple[float, ...], tuple[int, ...]], Sequence[int]] = {}
    sent: list[int] = []
    for tasks in list_forward_passes(graph):
        seconds = tuple(seconds_of[number] for number in tasks)
        crossing = tuple(_bytes_that_go_on(graph, tasks))
        if (seconds, crossing) not in known:
            sends = [SEEN * costs.of_copy("send", nbytes) for nbytes in crossing]
            known[seconds, crossing] = _Balance(seconds, sends, devices, laps).find_ends()
        ends = known[seconds, crossing]
        sent = [crossing[end - 1] for end in ends]
        chunk_of |= {number: bisect_right(ends, place) for place, number in enumerate(tasks)}
    chunk_of |= {backward: chunk_of[pair] for backward, pair in pairs.items() if pair in chunk_of}
    return Cut(chunk_of, sent)


def pair_backward(graph: TaskGraph) -> dict[int, int]:
    """By backward task: the forward task of its layer, which is the last one with the largest
    weight or activation that both touch. Tasks that touch none have that of the task before."""
    last: dict[int, int] = {}
    users: dict[int, int] = {}
    pairs: dict[int, int] = {}
    latest: dict[int, int] = {}
    """By micro-batch: the forward task of its latest task."""
    for number, task in enumerate(graph.tasks):
        if task.phase == FORWARD:
            latest[task.turn] = number
            for b in task.touches:
                users[b] = users.get(b, 0) + 1 if b in last and _is_of(last[b], task, graph) else 1
                last[b] = number
        elif task.phase == BACKWARD and task.turn in latest:
            shared = {
                b: graph.buffers[b].nbytes
                for b in task.reads
                if b in last and _is_of(last[b], task, graph) and users[b] <= USERS
            }
            if shared:
                latest[task.turn] = last[max(shared, key=lambda b: shared[b])]
            pairs[number] = latest[task.turn]
    return pairs


def _is_of(number: int, task: Task, graph: TaskGraph) -> bool:
    """Whether the task of this number is of the same micro-batch."""
    return graph.tasks[number].turn == task.turn


def list_forward_passes(graph: TaskGraph) -> list[list[int]]:
    """The tasks of each micro-batch's forward pass. What follows the last backward pass measures
    or clips gradients, and is of none."""
    passes: dict[int, list[int]] = {}
    trained = {task.turn for task in graph.tasks if task.phase == BACKWARD}
    for number, task in enumerate(graph.tasks):
        if task.phase == FORWARD and (not trained or task.turn in trained):
            passes.setdefault(task.turn, []).append(number)
    return list(passes.values())


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to cut what is before the last of these ends."""

    ends: tuple[int, ...]
    loads: tuple[float, ...]
    """The seconds of each device."""
    sent: float = 0.0
    """The seconds of sends that are not hidden."""
    uneven: float = 0.0
    """Seconds by which chunks differ from what was wanted, weighed by how much they do."""


class _Balance:
    """Finds cuts that give all devices equally much to do. It goes from chunk to chunk and keeps
    the best ways so far: what a chunk has too much, its device's next ones have less."""

    def __init__(
        self, seconds: Sequence[float], sends: Sequence[float], devices: int, laps: int
    ) -> None:
        """`sends`: what a cut behind each task costs."""
        self._until = [0.0, *accumulate(seconds)]
        self._sends, self._devices, self._laps = sends, devices, laps
        self._share = self._until[-1] / devices
        usual = sorted(sends)[len(sends) // 2]
        cheap = [at for at in range(1, len(sends)) if sends[at - 1] <= usual]
        self._tail = self._until[-1] - self._until[cheap[-1]] if cheap else 0.0
        """The seconds of what should not be cut at the end, such as a large head."""

    def find_ends(self) -> Sequence[int]:
        """Where each chunk but the last one ends."""
        if not self._share:
            return ()
        ways = [_Way((0,), (0.0,) * self._devices)]
        for chunk in range(self._devices * self._laps):
            best: dict[tuple[int, tuple[float, ...]], _Way] = {}
            for way in (longer for shorter in ways for longer in self._extend(shorter, chunk)):
                alike = way.ends[-1], tuple(round(load / self._share, 3) for load in way.loads)
                if alike not in best or self._cost(way) < self._cost(best[alike]):
                    best[alike] = way
            ways = nsmallest(CUTS, best.values(), key=self._cost)
        best_way = min(ways, key=lambda way: max(way.loads) + way.sent / self._devices)
        return best_way.ends[1:-1]

    def _cost(self, way: _Way) -> float:
        return way.uneven + way.sent / self._devices

    def _extend(self, way: _Way, chunk: int) -> Iterator[_Way]:
        """The ways to cut up to the end of this chunk."""
        until, begin = self._until, way.ends[-1]
        lap, device = divmod(chunk, self._devices)
        wanted = self._wanted_seconds(way.loads[device], lap, device)
        is_last = chunk + 1 == self._devices * self._laps
        for end in self._list_places(begin, wanted, is_last):
            seconds = until[end] - until[begin]
            loads = (*way.loads[:device], way.loads[device] + seconds, *way.loads[device + 1 :])
            if lap + 1 < self._laps:
                uneven = way.uneven + (seconds - wanted) ** 2 / self._share
            else:  # what these have too much, those behind them have too little
                over = [load - self._share for load in loads[: device + 1]]
                others = max(1, self._devices - device - 1)
                uneven = (sum(x * x for x in over) + sum(over) ** 2 / others) / self._share
            yield _Way((*way.ends, end), loads, way.sent + self._sends[end - 1], uneven)

    def _wanted_seconds(self, load: float, lap: int, device: int) -> float:
        """An equal part of what a device has yet to get."""
        left, laps = self._share - load, self._laps - lap
        if device == self._devices - 1 and laps > 1:
            return min(left / laps, (left - self._tail) / (laps - 1))
        return left / laps

    def _list_places(self, begin: int, wanted: float, is_last: bool) -> Sequence[int]:
        """Where a chunk may end."""
        last = len(self._sends)
        if is_last or begin == last:
            return (last,)
        at, slack = self._until[begin] + wanted, SLACK * self._share / self._laps
        first = max(begin + 1, min(last - 1, bisect_left(self._until, at - slack)))
        near = range(first, min(last, max(first + 1, bisect_right(self._until, at + slack))))
        return nsmallest(PLACES, near, key=lambda end: self._sends[end - 1]) or (last,)


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
