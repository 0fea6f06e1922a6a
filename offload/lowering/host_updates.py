"""Runs updates on the host: the optimizer's state stays there, and only gradients are copied.

    device   ... b3 ......... b2 ......... b1          state in, update, state and parameter out
    d2h            g3 ->        g2 ->        g1 ->     becomes      gradient out
    host               u3           u2           u1    (the parameter comes in when next needed)

The update is the same function over the host copies of its buffers, so it gives the same bits. An
update in half precision stays on the device: the number of threads decides which of a CPU's loops
takes an element, and the loops round differently there.

A gradient that was cast to the parameter's type leaves the device before the cast if it is smaller
then, and the cast becomes a host task (bfloat16 to float32 is exact anywhere).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from offload.errors import GraphError
from offload.graph.costs import Costs
from offload.graph.taskgraph import Task, TaskGraph
from offload.program.kernels import values_in
from offload.torch_seams import to_copy

CHOICES = ("auto", "host", "device")
CASTS = (to_copy, torch.ops.aten.copy_.default)
EXACT = frozenset({torch.float32, torch.float64})
"""Types whose elements any number of threads rounds alike."""


@dataclass(frozen=True, slots=True)
class Move:
    """What it costs and saves to run an update on the host."""

    saved: float
    """Seconds saved on the busier direction of the link."""
    seconds: float
    """Seconds that all host workers together take for it."""
    casts: frozenset[int] = frozenset()
    """Casts that move to the host with it."""

    @property
    def pays(self) -> bool:
        return self.saved > self.seconds


@dataclass(frozen=True, slots=True)
class _Users:
    """The tasks that write and read each buffer."""

    writers: dict[int, list[int]]
    readers: dict[int, list[int]]

    @classmethod
    def from_graph(cls, graph: TaskGraph) -> "_Users":
        users = cls({}, {})
        for number, task in enumerate(graph.tasks):
            for b in task.writes:
                users.writers.setdefault(b, []).append(number)
            for b in task.reads:
                users.readers.setdefault(b, []).append(number)
        return users


def move_updates_to_host(
    graph: TaskGraph, costs: Costs, choose: str = "auto", fixed: Collection[int] = ()
) -> TaskGraph:
    """Move updates to the host. `choose`: "auto" moves those for which the link is slower, "host"
    all that can move, "device" none. `fixed`: buffers that live on a device."""
    if choose not in CHOICES:
        raise GraphError(f"choose={choose!r} is unknown; choose one of {', '.join(CHOICES)}")
    if choose == "device":
        return graph
    chosen = weigh_moves(graph, costs, fixed)
    if choose == "auto":
        chosen = {number: move for number, move in chosen.items() if move.pays}
    if not chosen:
        return graph
    foreign = any(_has_device_kernels(graph.tasks[number]) for number in chosen)
    going = {*chosen, *_find_casts(graph, chosen)}
    tasks = [
        _put_on_host(task, foreign) if number in going else task
        for number, task in enumerate(graph.tasks)
    ]
    return graph.with_tasks(
        tasks,
        None,
        f"{len(chosen)} updates run on the host",
        "host_updates: the last bits differ from those of the device's kernels" if foreign else "",
    )


def variants(
    graph: TaskGraph, costs: Costs, choose: str, fixed: Collection[int] = ()
) -> Iterator[tuple[str, TaskGraph]]:
    """Different graphs to plan and simulate. "auto": no update on the host, then more and more."""
    if choose == "host":
        yield "updates on the host", move_updates_to_host(graph, costs, "host", fixed)
        return
    yield "", graph
    possible = weigh_moves(graph, costs, fixed) if choose == "auto" else {}
    pay = sum(move.pays for move in possible.values())
    if 0 < pay < len(possible):
        name = f"{pay} of {len(possible)} updates on the host"
        yield name, move_updates_to_host(graph, costs, "auto", fixed)
    if possible:
        yield "updates on the host", move_updates_to_host(graph, costs, "host", fixed)


def weigh_moves(graph: TaskGraph, costs: Costs, fixed: Collection[int] = ()) -> dict[int, Move]:
    """What each update that can run on the host would cost and save."""
    users = _Users.from_graph(graph)
    fixed = frozenset(fixed)
    able = {n for n, task in enumerate(graph.tasks) if _can_move(task, fixed)}
    return {n: _weigh_move(graph, costs, n, able, users) for n in sorted(able)}


def _can_move(task: Task, fixed: frozenset[int]) -> bool:
    if task.phase != "update" or task.lane != "compute" or not fixed.isdisjoint(task.touches):
        return False
    # A handmade kernel, without calls, works on bytes wherever they are.
    return is_update(task) and _is_exact(task)


def is_update(task: Task) -> bool:
    """Whether it is an update, of the optimizer or handmade."""
    return all(map(_is_update_kernel, _calls(task)))


def _is_update_kernel(call: Any) -> bool:
    """Whether it is a kernel of updates: only these say whether they work element by element."""
    return hasattr(call.op, "elementwise")


def _is_exact(task: Task) -> bool:
    """Whether any number of threads gives the same bits."""
    return all(
        value.dtype in EXACT and getattr(call.op, "elementwise", True)
        for call in _calls(task)
        for value in values_in((call.args, *call.kwargs.values(), call.outputs))
    )


def _find_casts(graph: TaskGraph, chosen: Mapping[int, Move]) -> set[int]:
    """The casts that are made for these updates alone."""
    casts = {cast for move in chosen.values() for cast in move.casts}
    made = {graph.tasks[cast].writes[0]: cast for cast in casts}
    others = {b for n, task in enumerate(graph.tasks) if n not in chosen for b in task.reads}
    return {cast for b, cast in made.items() if b not in others}


def _weigh_move(graph: TaskGraph, costs: Costs, number: int, able: set[int], users: _Users) -> Move:
    """Pieces of one update share the cost of what they have in common."""
    task, buffers = graph.tasks[number], graph.buffers
    foreign = _has_device_kernels(task)
    into = out = 0.0
    casts = set[int]()
    seconds = costs.of_task(_put_on_host(task, foreign))
    for b in task.touches:
        nbytes, readers = buffers[b].nbytes, users.readers.get(b, ())
        pieces = sum(n in able for n in readers) or 1
        if buffers[b].persistent:
            # The parameter is on the device anyway; the state is copied for the update alone.
            into += nbytes if able.issuperset(readers) else 0
            out += nbytes / pieces if b in task.writes else 0
            continue
        cast = _find_cast(graph, b, able, users)
        if cast is not None:
            casts.add(cast)
            nbytes = buffers[graph.tasks[cast].reads[0]].nbytes
            seconds += costs.of_task(_put_on_host(graph.tasks[cast], foreign)) / pieces
        out -= nbytes / pieces
    # The two directions run at the same time: only the busier one counts.
    saved = max(into / costs.h2d, out / costs.d2h)
    return Move(saved, seconds / costs.host_workers, frozenset(casts))


def _find_cast(graph: TaskGraph, b: int, able: set[int], users: _Users) -> int | None:
    """The task that only casts a smaller gradient for updates, if there is one."""
    writers = users.writers.get(b, ())
    if len(writers) != 1 or b in graph.outputs or not able.issuperset(users.readers.get(b, ())):
        return None
    [number] = writers
    task = graph.tasks[number]
    calls = _calls(task)
    if len(calls) != 1 or calls[0].of_torch not in CASTS or task.lane != "compute" or task.after:
        return None
    if task.writes != (b,) or len(task.reads) != 1:
        return None
    source = graph.buffers[task.reads[0]]
    return number if source.nbytes < graph.buffers[b].nbytes and not source.persistent else None


def _put_on_host(task: Task, foreign: bool) -> Task:
    """The task on the host. Measurements from another device are dropped."""
    return replace(task, lane="host", seconds=None if foreign else task.seconds)


def _has_device_kernels(task: Task) -> bool:
    """Whether it was captured with a GPU's kernels, which the host does not have."""
    return any(call.op.device.type != "cpu" for call in _calls(task) if _is_update_kernel(call))


def _calls(task: Task) -> Sequence[Any]:
    return getattr(task.kernel, "calls", ())
