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

from offload.graph.costs import Costs
from offload.graph.memgraph import RELOAD
from offload.graph.taskgraph import TaskGraph

SMALL = 1 << 16
"""A tensor of fewer bytes is not worth a copy."""
ANYWAY, FIRST = 1000, 2000
"""Ranks above any number of moves."""


def choose_resident(
    graph: TaskGraph, room: Mapping[int, int], first: frozenset[int] = frozenset()
) -> frozenset[int]:
    """Persistent buffers that fit into the room of each device. `first`: those that come before
    others."""
    moves, homes = _count_moves(graph), graph.home_devices()
    by_tensor: dict[tuple[int, str], list[int]] = defaultdict(list)
    for b in sorted(moves):
        by_tensor[homes[b], graph.buffers[b].tensor or f"#{b}"].append(b)
    classes: dict[tuple[int, int], list[list[int]]] = defaultdict(list)
    for (device, _), pieces in by_tensor.items():
        nbytes = sum(graph.align(graph.buffers[b].nbytes) for b in pieces)
        most = max(moves[b][0] for b in pieces)
        if not first.isdisjoint(pieces):
            most = FIRST
        elif nbytes < SMALL:
            most = ANYWAY
        classes[device, -most].append(pieces)
    left = dict(room)
    chosen: set[int] = set()
    for (device, _), tensors in sorted(classes.items()):
        tensors.sort(key=lambda pieces: min(moves[b][1] for b in pieces))
        sizes = [sum(graph.align(graph.buffers[b].nbytes) for b in pieces) for pieces in tensors]
        share = min(1.0, max(0, left.get(device, 0)) / max(1, sum(sizes)))
        due = 0.0
        for pieces, nbytes in zip(tensors, sizes, strict=True):
            due += nbytes * share
            # A tensor that is too large for its share makes room for a smaller one.
            if nbytes <= left.get(device, 0) and (share == 1.0 or due >= nbytes / 2):
                chosen.update(pieces)
                left[device] -= nbytes
                due -= nbytes
    return frozenset(chosen)


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
