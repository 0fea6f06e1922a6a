"""Spreads a step over several devices. Pure.

    device 0   F0 F1 | f0 f1 | . . . . B1 B0 | b1 b0        layers 0 and 1, their weights and states
    device 1         | F2 F3 | f2 f3 B3 B2 | b3 b2          layers 2 and 3

The forward tasks of each micro-batch are cut where the fewest bytes go on, into chunks of about
equally many seconds; chunk c is of device c mod k. A backward task is of the chunk whose weights
and activations it reads, and its seconds count there. What outlives the step has its home where it
is read first, and what one update changes together has one home; a task that changes such a buffer
runs there. So every sum is made on one device, in the order of the micro-batches: all bits are
those of one device.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from offload.errors import GraphError
from offload.graph.costs import Costs
from offload.graph.taskgraph import BACKWARD, FORWARD, UPDATE, Role, Task, TaskGraph
from offload.lowering.free_draws import free_draws

SLACK = 0.45
"""By how much of a chunk's seconds its end may be elsewhere, so that less goes on there."""
SEEN = 0.1
"""The share of a copy's seconds that other work does not hide."""
USERS = 8
"""What more tasks of a forward pass touch, such as a mask, is of no layer."""
PLACED = "placed on"
"""How the note of a graph begins that says where its tasks run."""
PLACES = 32
"""At most so many places are tried for the end of a chunk."""


def place_tasks(
    graph: TaskGraph,
    devices: int,
    costs: Costs,
    chunks: int = 1,
    homes: Mapping[str, int] | None = None,
) -> TaskGraph:
    """The same step on so many devices, or on as many as it can be cut for. `chunks`: of each
    device. `homes`: the devices where other steps have left tensors, which stay there."""
    if devices < 1:
        raise GraphError(f"devices={devices}: give 1 or more")
    if devices == 1:
        return graph
    if graph.device_count > 1 or len(graph.devices) > 1:
        raise GraphError(f"devices={devices}: the tasks name devices {graph.devices} already")
    homes = homes or {}
    turns = _find_micro_batches(graph)
    graph = graph.with_tasks(
        [replace(task, turn=turn) for task, turn in zip(graph.tasks, turns, strict=True)]
    )
    places = _place_each(graph, devices, costs, chunks, homes)
    tasks = [replace(task, device=device) for task, device in zip(graph.tasks, places, strict=True)]
    note = _describe(graph, devices, used=len({*places}))
    placed = replace(graph.with_tasks(tasks, None, note), device_count=devices, homes=dict(homes))
    placed.check()
    return free_draws(placed)


def _find_micro_batches(graph: TaskGraph) -> list[int]:
    """The micro-batch of each task: its turn, if the graph has turns. Otherwise a new one begins
    where the step goes forward after it has gone backward."""
    if any(task.turn for task in graph.tasks):
        return [task.turn for task in graph.tasks]
    found: list[int] = []
    number, before = 0, ""
    for task in graph.tasks:
        if task.phase == FORWARD and before == BACKWARD:
            number += 1
        if task.phase in (FORWARD, BACKWARD):
            before = task.phase
        found.append(number)
    return found


def _describe(graph: TaskGraph, devices: int, used: int) -> str:
    fewer = f" of {devices} asked, because it cannot be cut further" if used < devices else ""
    on = "1 device" if used == 1 else f"{used} devices"
    passes = len(_list_forward_passes(graph))
    idle = (
        f"; they take turns, because there are fewer micro-batches ({passes}): accumulate batches,"
        " or give micro_batches"
    )
    return f"{PLACED} {on}{fewer}{idle if 1 < used > passes else ''}"


def _place_each(
    graph: TaskGraph, devices: int, costs: Costs, chunks: int, known: Mapping[str, int]
) -> list[int]:
    """The device of every task."""
    pairs = _pair_backward(graph)
    chunk_of = _cut_forward(graph, pairs, devices, chunks, costs)
    chunk_of |= {backward: chunk_of[pair] for backward, pair in pairs.items() if pair in chunk_of}
    near = {number: chunk % devices for number, chunk in chunk_of.items()}
    homes = _find_homes(graph, near, known)
    at = {b: home for b in range(len(graph.buffers)) if (home := homes.find(b)) is not None}
    """Where the newest content of each buffer was made."""
    placed: list[int] = []
    for number, task in enumerate(graph.tasks):
        device = _find_home_of(graph, task, homes)
        if device is None:
            device = near.get(number)
        if device is None:
            sources = {b: at[b] for b in task.reads if b in at}
            device = _device_of_most(graph, sources, placed[-1] if placed else 0)
        placed.append(device)
        at.update(dict.fromkeys(task.writes, device))
        for b in task.writes:
            if graph.buffers[b].persistent:
                homes.settle(b, device)
    return placed


def _find_home_of(graph: TaskGraph, task: Task, homes: "_HomeGroups") -> int | None:
    """What outlives the step is changed at its one home, a sum at the home of most of its bytes."""
    written = {b: home for b in task.writes if (home := homes.find(b)) is not None}
    kept = {b: home for b, home in written.items() if graph.buffers[b].persistent}
    return _device_of_most(graph, kept or written, 0) if written else None


def _device_of_most(graph: TaskGraph, where: Mapping[int, int], default: int) -> int:
    """The device of most bytes of these buffers; the default one if it has as many."""
    weight = {default: 0}
    for b, device in where.items():
        weight[device] = weight.get(device, 0) + graph.buffers[b].nbytes
    return max(weight, key=lambda device: (weight[device], device == default))


# ---- where what outlives the step has its home --------------------------------------------------


def _find_homes(
    graph: TaskGraph, near: Mapping[int, int], known: Mapping[str, int]
) -> "_HomeGroups":
    """The device of each buffer that outlives the step or sums up over micro-batches. `near`: the
    devices of forward and backward tasks."""
    homes = _HomeGroups(len(graph.buffers))
    pieces: dict[str, int] = {}
    read: dict[int, int] = {}
    for b, buffer in enumerate(graph.buffers):
        if buffer.persistent and buffer.tensor:
            homes.join(b, pieces.setdefault(buffer.tensor, b))
            if buffer.tensor in known:
                read[b] = known[buffer.tensor]
    for number, task in enumerate(graph.tasks):
        kept = [b for b in task.writes if _has_home(graph, task, b)]
        for b in kept[1:]:
            homes.join(kept[0], b)
        for b in task.touches if number in near else ():
            if graph.buffers[b].persistent:
                read.setdefault(b, near[number])
        if task.phase == UPDATE and kept:
            for b in task.reads:
                if b not in kept and graph.buffers[b].role is Role.GRADIENT:
                    homes.join(kept[0], b)
    for b, device in read.items():
        homes.settle(b, device)
    return homes


def _has_home(graph: TaskGraph, task: Task, b: int) -> bool:
    """Whether a task changes what outlives the step, or adds to a sum."""
    buffer = graph.buffers[b]
    return buffer.persistent or (buffer.role is Role.GRADIENT and b in task.reads)


class _HomeGroups:
    """Groups of buffers that have one home."""

    def __init__(self, count: int) -> None:
        self._above = list(range(count))
        self._devices: dict[int, int] = {}

    def join(self, a: int, b: int) -> None:
        """Put two buffers into one group. None has a home yet."""
        a, b = sorted((self._first(a), self._first(b)))
        self._above[b] = a

    def settle(self, b: int, device: int) -> None:
        """Give a buffer's group its home if it has none."""
        self._devices.setdefault(self._first(b), device)

    def find(self, b: int) -> int | None:
        return self._devices.get(self._first(b))

    def _first(self, b: int) -> int:
        while self._above[b] != b:
            self._above[b] = self._above[self._above[b]]
            b = self._above[b]
        return b


# ---- chunks -------------------------------------------------------------------------------------


def _pair_backward(graph: TaskGraph) -> dict[int, int]:
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


def _cut_forward(
    graph: TaskGraph, pairs: Mapping[int, int], devices: int, chunks: int, costs: Costs
) -> dict[int, int]:
    """The chunk of each task of a forward pass. `pairs`: the forward tasks of backward ones, whose
    seconds count, too."""
    seconds_of = [costs.of_task(task) for task in graph.tasks]
    for backward, pair in pairs.items():
        seconds_of[pair] += seconds_of[backward]
    chunk_of: dict[int, int] = {}
    known: dict[tuple[tuple[float, ...], tuple[int, ...]], list[int]] = {}
    for tasks in _list_forward_passes(graph):
        seconds = tuple(seconds_of[number] for number in tasks)
        crossing = tuple(_bytes_that_go_on(graph, tasks))
        if (seconds, crossing) not in known:
            sends = [SEEN * costs.of_copy("send", nbytes) for nbytes in crossing]
            until = [0.0, *accumulate(seconds)]
            known[seconds, crossing] = _balance(until, sends, devices * chunks)
        ends = known[seconds, crossing]
        chunk_of |= {number: bisect_right(ends, place) for place, number in enumerate(tasks)}
    return chunk_of


def _list_forward_passes(graph: TaskGraph) -> list[list[int]]:
    """The tasks of each micro-batch's forward pass. What follows the last backward pass measures
    or clips gradients, and is of none."""
    passes: dict[int, list[int]] = {}
    trained = {task.turn for task in graph.tasks if task.phase == BACKWARD}
    for number, task in enumerate(graph.tasks):
        if task.phase == FORWARD and (not trained or task.turn in trained):
            passes.setdefault(task.turn, []).append(number)
    return list(passes.values())


def _balance(until: Sequence[float], sends: Sequence[float], chunks: int) -> list[int]:
    """Where each chunk but the last one ends: near its share, and so that the fullest chunk has the
    least to do. `until`: the seconds before each place; `sends`: what a cut after it costs."""
    share = until[-1] / chunks
    if not share:
        return []
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    """By end of the latest chunk: the seconds of the fullest one, the squares of all, the ends."""
    for number in range(1, chunks + 1):
        near = [at for at in range(1, len(sends)) if abs(until[at] / share - number) < SLACK]
        near = sorted(near, key=lambda at: sends[at - 1])[:PLACES]
        if number == chunks:
            near = [len(sends)]
        ways = {end: [*_extend(best, end, until, sends)] for end in near}
        best = {end: min(found) for end, found in ways.items() if found} or best
    (_, _, ends) = best[len(sends)]
    return ends[:-1]


def _extend(
    best: Mapping[int, tuple[float, float, list[int]]],
    end: int,
    until: Sequence[float],
    sends: Sequence[float],
) -> Iterator[tuple[float, float, list[int]]]:
    """The ways of cutting up to this end."""
    for start, (most, squares, ends) in best.items():
        if start < end:
            seconds = until[end] - until[start] + sends[end - 1]
            yield max(most, seconds), squares + seconds * seconds, [*ends, end]


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
