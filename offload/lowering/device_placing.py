"""Spreads a step over several devices. Pure.

    device 0   F0 F1 | f0 f1 | . . . . B1 B0 | b1 b0        layers 0 and 1, their weights and states
    device 1         | F2 F3 | f2 f3 B3 B2 | b3 b2          layers 2 and 3

The forward tasks of each micro-batch are cut into chunks (device_cuts.py), and chunk c is of device
c mod k in lap c div k. A backward task is where the forward task of its layer is. What outlives the
step has its home where it is read first, and what one update changes together has one home; a task
that changes such a buffer runs there. So every sum is made on one device, in the order of the
micro-batches: all bits are those of one device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from offload.errors import GraphError
from offload.graph.costs import Costs
from offload.graph.taskgraph import BACKWARD, FORWARD, UPDATE, Role, Task, TaskGraph
from offload.lowering.device_cuts import list_forward_passes, pair_backward
from offload.lowering.device_laps import LAPS, choose_cut
from offload.lowering.free_draws import free_draws

PLACED = "placed on"
"""How the note of a graph begins that says where its tasks run."""


def place_tasks(
    graph: TaskGraph,
    devices: int,
    costs: Costs,
    laps: Sequence[int] = LAPS,
    homes: Mapping[str, int] | None = None,
) -> TaskGraph:
    """The same step on so many devices, or on as many as it can be cut for. `laps`: how often a
    micro-batch may go round the devices; the fastest is chosen. `homes`: the devices where other
    steps have left tensors, which stay there."""
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
    chunk_of = choose_cut(graph, pair_backward(graph), devices, laps, costs).chunk_of
    places = _place_each(graph, devices, chunk_of, homes)
    tasks = [
        replace(task, device=device, lap=chunk_of.get(number, 0) // devices)
        for number, (task, device) in enumerate(zip(graph.tasks, places, strict=True))
    ]
    placed = graph.with_tasks(
        tasks, None, _describe(tasks, devices, len(list_forward_passes(graph)))
    )
    placed = replace(placed, device_count=devices, homes=dict(homes))
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


def _describe(tasks: Sequence[Task], devices: int, passes: int) -> str:
    used = len({task.device for task in tasks})
    laps = 1 + max((task.lap for task in tasks), default=0)
    fewer = f" of {devices} asked, because it cannot be cut further" if used < devices else ""
    on = "1 device" if used == 1 else f"{used} devices"
    rounds = f", and each micro-batch goes round them {laps} times" if laps > 1 else ""
    idle = (
        f"; they take turns, because there are fewer micro-batches ({passes}): accumulate batches,"
        " or give micro_batches"
    )
    return f"{PLACED} {on}{fewer}{rounds}{idle if 1 < used > passes else ''}"


def _place_each(
    graph: TaskGraph, devices: int, chunk_of: Mapping[int, int], known: Mapping[str, int]
) -> list[int]:
    """The device of every task."""
    near = {number: chunk % devices for number, chunk in chunk_of.items()}
    near = _follow_homes(graph, near, known)
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


def _follow_homes(
    graph: TaskGraph, near: Mapping[int, int], known: Mapping[str, int]
) -> Mapping[int, int]:
    """The devices of forward and backward tasks, if other steps have left weights somewhere: tasks
    go to their weights, except to those of several devices, and else to the task before them."""
    users: dict[int, set[int]] = {}
    for number, device in near.items():
        for b in graph.tasks[number].reads:
            users.setdefault(b, set()).add(device)
    tensors = {b: graph.buffers[b].tensor for b, used in users.items() if len(used) == 1}
    homes = {b: known[tensor] for b, tensor in tensors.items() if tensor in known}
    latest: dict[int, int] = {}
    following: dict[int, int] = {}
    for number, device in near.items():
        task = graph.tasks[number]
        at = {b: homes[b] for b in task.reads if b in homes}
        following[number] = _device_of_most(graph, at, latest.get(task.turn, device))
        latest[task.turn] = following[number]
    return following if homes else near


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
