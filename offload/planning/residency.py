"""Chooses the persistent tensors that stay on their device for the whole step. Pure.

A byte of a streamed weight moves up to three times a step (in for the forward pass, in for the
backward pass, out after its update); a byte of the optimizer's state moves twice. The tensors that
move most per byte stay first. If tensors of one kind do not all fit, every k-th of them in order of
first use stays, so that the copies are spread evenly:

    w0 [w1] w2 [w3] w4 [w5]     rather than     [w0 w1 w2] w3 w4 w5

Nothing hides the first copies of a step, so their tensors may stay before all others.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from offload.graph.costs import Costs
from offload.graph.memgraph import RELOAD
from offload.graph.taskgraph import Task, TaskGraph
from offload.planning.refusal import scratch_bytes, working_set

SMALL = 1 << 16
"""A tensor of fewer bytes is not worth a copy."""
ANYWAY, FIRST = 1000, 2000
"""Ranks above any number of moves."""


@dataclass(frozen=True, slots=True)
class _Streamed:
    """A tensor that moves in every step if it does not stay."""

    pieces: tuple[int, ...]
    device: int
    nbytes: int
    moves: int
    first: int
    """The first task that uses it."""


class Residency:
    """What could stay on the devices of a graph, counted once for many questions."""

    def __init__(self, graph: TaskGraph) -> None:
        moves, self._homes = _count_moves(graph), graph.home_devices()
        self._sizes = [graph.align(buffer.nbytes) for buffer in graph.buffers]
        self._graph = graph
        self._tasks: dict[int, list[Task]] = {device: [] for device in graph.devices}
        for task in graph.tasks:
            self._tasks[task.device].append(task)
        by_tensor: dict[tuple[int, str], list[int]] = defaultdict(list)
        for b in sorted(moves):
            by_tensor[self._homes[b], graph.buffers[b].tensor or f"#{b}"].append(b)
        self._streamed = [
            _Streamed(
                tuple(pieces),
                device,
                sum(self._sizes[b] for b in pieces),
                max(moves[b][0] for b in pieces),
                min(moves[b][1] for b in pieces),
            )
            for (device, _), pieces in by_tensor.items()
        ]

    def choose(
        self, room: Mapping[int, int], first: frozenset[int] = frozenset()
    ) -> frozenset[int]:
        """Persistent buffers that fit into the room of each device. `first`: those that come
        before others."""
        classes: dict[tuple[int, int], list[_Streamed]] = defaultdict(list)
        for tensor in self._streamed:
            most = ANYWAY if tensor.nbytes < SMALL else tensor.moves
            if not first.isdisjoint(tensor.pieces):
                most = FIRST
            classes[tensor.device, -most].append(tensor)
        left = dict(room)
        chosen: set[int] = set()
        for (device, _), tensors in sorted(classes.items(), key=lambda pair: pair[0]):
            tensors.sort(key=lambda tensor: tensor.first)
            whole = sum(tensor.nbytes for tensor in tensors)
            share = min(1.0, max(0, left.get(device, 0)) / max(1, whole))
            due = 0.0
            for tensor in tensors:
                due += tensor.nbytes * share
                # A tensor that is too large for its share makes room for a smaller one.
                fits = tensor.nbytes <= left.get(device, 0)
                if fits and (share == 1.0 or due >= tensor.nbytes / 2):
                    chosen.update(tensor.pieces)
                    left[device] -= tensor.nbytes
                    due -= tensor.nbytes
        return frozenset(chosen)

    def find_room(self, device: int, capacity: int) -> int:
        """The most resident bytes that leave enough for each task of a device, whose operands may
        be resident, and for the tasks of other steps of the same runner."""
        low, high = 0, capacity
        while high - low > capacity // 64:
            middle = (low + high) // 2
            if self._leaves_enough(device, capacity, self.choose({device: middle})):
                low = middle
            else:
                high = middle
        return low

    def _leaves_enough(self, device: int, capacity: int, resident: frozenset[int]) -> bool:
        sets = [working_set(self._graph, task, device, resident) for task in self._tasks[device]]
        taken = sum(self._sizes[b] for b in resident if self._homes[b] == device)
        return taken + scratch_bytes(self._graph, device) + max(sets, default=0) <= capacity


def _count_moves(graph: TaskGraph) -> dict[int, tuple[int, int]]:
    """By persistent buffer that could stay: how often it would move, and its first use."""
    phases: dict[int, set[str]] = defaultdict(set)
    first: dict[int, int] = {}
    written: set[int] = set()
    on_host: set[int] = set()
    for number, task in enumerate(graph.tasks):
        for b in task.touches:
            if graph.buffers[b].persistent:
                # The update of a weight follows its backward pass, so both are one stay.
                phases[b].add("forward" if task.phase == "forward" else "backward")
                first.setdefault(b, number)
        written.update(task.writes)
        if task.lane == "host":
            on_host.update(task.touches)
    return {b: (len(phases[b]) + (b in written), first[b]) for b in phases if b not in on_host}


def find_exposed(
    graph: TaskGraph, costs: Costs, resident: Collection[int], room: Mapping[int, int]
) -> frozenset[int]:
    """The streamed buffers whose first copy no work hides, because the step needs them too early.
    It takes as many as there is room for, from the first task on."""
    left, copied = dict(room), dict.fromkeys(room, 0.0)
    homes = graph.home_devices()
    early: set[int] = set()
    seen = set(resident)
    now = 0.0
    for task in graph.tasks:
        for b in task.reads:
            buffer, home = graph.buffers[b], homes[b]
            if b in seen or not buffer.persistent or home not in left:
                continue
            seen.add(b)
            there = copied[home] + costs.of_copy(RELOAD, buffer.nbytes)
            nbytes = graph.align(buffer.nbytes)
            if there > now and nbytes <= left[home]:
                early.add(b)
                left[home] -= nbytes
            else:
                copied[home] = there
        now += costs.of_task(task)
    return frozenset(early)
