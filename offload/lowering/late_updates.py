"""Updates that wait for the next step's forward pass: the step, rotated.

    a step    F1 F2 F3 B3 B2 B1 u1 u2 u3                   u3, u2: late

    first     F1 F2 F3 B3 B2 B1 u1                         their gradients are left behind
    steady    u2 u3 | F1 F2 F3 B3 B2 B1 u1                 those of the step before, then the step
    flush     u2 u3                                        whoever looks at the weights needs it

The updates that a step's backward pass has no time for have that of the next one's forward: first,
steady, steady, ..., flush does the tasks of as many steps in an order that their dependencies
allow, so every bit is the same. Nothing is delayed by a step: F2 reads w2, which u2 writes, and
each of the three is an ordinary graph, planned and proved as any other.

What lies between the two runs, the gradients, becomes persistent. The optimizer's numbers are kept
when the step ends (kept.py). Which updates are late is chosen by `late_choice`.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from offload.kept import Kept
from offload.kernels import Call, Calls, Program
from offload.lowering.host_updates import is_update
from offload.lowering.merging import held_in_order
from offload.taskgraph import Buffer, Role, Task, TaskGraph
from offload.updates import Update

NEVER = 1 << 60


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """Three graphs over the same buffers, by the same numbers."""

    first: TaskGraph
    steady: TaskGraph
    flush: TaskGraph
    late: int
    """Updates in `flush`."""
    updates: int
    """In the whole step."""


def rotated(graph: TaskGraph, wanted: Collection[int]) -> Rotation | None:
    """With those of the updates `wanted` late that may be; None where none may."""
    if graph.program is None:
        return None  # nobody would hold the gradients
    late = _late(graph, wanted)
    if not late:
        return None
    prompt = [number for number in range(len(graph.tasks)) if number not in late]
    carried = _carried(graph, late)
    buffers = [_pending(b, x) if b in carried else x for b, x in enumerate(graph.buffers)]
    kept = Kept()
    ahead = [_with_kept(graph.tasks[number], kept) for number in _by_need(graph, late, prompt)]
    updates = updates_of(graph)
    count = len(updates.intersection(late))
    note = f"{count} of {len(updates)} updates run in the next forward pass"
    steady = graph.with_tasks([*ahead, *_moved(graph, prompt, len(ahead))], buffers, note)
    first = graph.with_tasks(_moved(graph, prompt, 0), buffers)
    flush = graph.with_tasks(ahead, buffers)
    flush.outputs.clear()
    _bind(graph.program, (first, steady, flush), [buffers[b] for b in sorted(carried)], kept)
    return Rotation(first, steady, flush, count, len(updates))


def updates_of(graph: TaskGraph) -> set[int]:
    """Those that change a parameter: the optimizer's, or made by hand."""
    return {
        number
        for number, task in enumerate(graph.tasks)
        if task.phase == "update"
        and any(graph.buffers[b].role is Role.PARAMETER for b in task.writes)
        and is_update(task)
    }


def _late(graph: TaskGraph, wanted: Collection[int]) -> set[int]:
    """Nothing that is not late comes after one that is, and nobody outside looks at what it makes.
    What scales a gradient in place for them alone, or casts it on the host, is late with them: what
    waits is smaller, or leaves the device once."""
    held = held_in_order(graph)
    successors: list[list[int]] = [[] for _ in graph.tasks]
    for number, needed in enumerate(graph.dependencies()):
        for before in needed:
            successors[before].append(number)
    updates = updates_of(graph).intersection(wanted)
    late: set[int] = set()
    for number, task in reversed(list(enumerate(graph.tasks))):
        may = (
            number not in held
            and task.engine in ("compute", "host")
            and late.issuperset(successors[number])
            and all(graph.buffers[b].role is not Role.INPUT for b in task.reads)
            and not {*task.writes}.intersection(graph.outputs)
        )
        if may and (number in updates or (successors[number] and _prepares(graph, task))):
            late.add(number)
    return late


def _prepares(graph: TaskGraph, task: Task) -> bool:
    in_place = task.phase == "update" and {*task.writes} <= {*task.reads}
    alone = not any(graph.buffers[b].persistent for b in task.touches)
    return alone and (in_place or task.engine == "host")


def _first_reads(graph: TaskGraph, order: Iterable[int]) -> dict[int, int]:
    """Of every buffer the first place in this order where it is read."""
    first: dict[int, int] = {}
    for place, number in enumerate(order):
        for b in graph.tasks[number].reads:
            first.setdefault(b, place)
    return first


def _needed(graph: TaskGraph, number: int, first: Mapping[int, int]) -> int:
    """When the first of its parameters is."""
    written = [b for b in graph.tasks[number].writes if graph.buffers[b].role is Role.PARAMETER]
    return min((first.get(b, NEVER) for b in written), default=NEVER)


def _by_need(graph: TaskGraph, late: set[int], prompt: Sequence[int]) -> list[int]:
    """The late tasks, first those whose parameters are read first; what they need, before them."""
    first = _first_reads(graph, prompt)
    need = {number: _needed(graph, number, first) for number in late}
    needed = graph.dependencies()
    for number in sorted(late, reverse=True):
        for before in needed[number]:
            if before in late:
                need[before] = min(need[before], need[number])
    return sorted(late, key=lambda number: (need[number], number))


def _carried(graph: TaskGraph, late: set[int]) -> set[int]:
    """What lies between the two runs: made by a task that is not late, read by one that is."""
    carried: set[int] = set()
    made_late: dict[int, bool] = {}
    for number, task in enumerate(graph.tasks):
        if number in late:
            carried.update(
                b
                for b in task.reads
                if not graph.buffers[b].persistent and not made_late.get(b, True)
            )
        made_late.update(dict.fromkeys(task.writes, number in late))
    return carried


def _pending(b: int, buffer: Buffer) -> Buffer:
    name = f"pending.{b}.{buffer.name}"
    role = Role.SUM if buffer.role is Role.GRADIENT else Role.STATE
    return replace(buffer, name=name, role=role, tensor=name, start=0)


def _moved(graph: TaskGraph, numbers: Sequence[int], by: int) -> list[Task]:
    """These tasks, from place `by` on. (No late one is in an `after`: those are held.)"""
    place = {old: new for new, old in enumerate(numbers, by)}
    return [
        replace(graph.tasks[old], after=tuple(place[a] for a in graph.tasks[old].after))
        for old in numbers
    ]


def _with_kept(task: Task, kept: Kept) -> Task:
    """With the numbers of its own step."""
    kernel = task.kernel
    if isinstance(kernel, Calls):
        return replace(task, kernel=Calls(tuple(_call(call, kept) for call in kernel.calls)))
    return replace(task, kernel=_call(kernel, kept)) if isinstance(kernel, Call) else task


def _call(call: Call, kept: Kept) -> Call:
    if not isinstance(call.op, Update):
        return call
    kept.watch(call.op.optimizer, call.op.group, call.op.parameter)
    return replace(call, op=replace(call.op, kept=kept))


def _bind(program: Any, graphs: Sequence[TaskGraph], pending: Sequence[Buffer], kept: Kept) -> None:
    held = {b.tensor: torch.zeros(b.nbytes, dtype=torch.uint8) for b in pending}
    tensors = {**program.tensors, **held}
    first, steady, flush = graphs
    for graph in (first, steady):
        graph.program = replace(
            program, tensors=tensors, recapture=None, after_step=(kept.keep, *program.after_step)
        )
    flush.program = Program((), (), tensors, device=program.device)
