"""Rotates a step, so that some of its updates run in the next step's forward pass.

    a step    F1 F2 F3 B3 B2 B1 u1 u2 u3                   u3 and u2 are late

    first     F1 F2 F3 B3 B2 B1 u1                         leaves the gradients of u2 and u3 behind
    steady    u2 u3 | F1 F2 F3 B3 B2 B1 u1                 late updates of the last step first
    flush     u2 u3                                        before anybody looks at the weights

Late updates have the time of the next forward pass. The sequence first, steady, steady, ..., flush
does the tasks of as many steps in an order that their dependencies allow, so every bit is the same.
No weight is a step old: F2 reads w2, which u2 writes first. Each of the three is an ordinary graph,
planned and proved like any other.

The gradients between two runs become persistent. A snapshot keeps the optimizer's numbers when the
step ends (settings_snapshot.py). rotation_choice.py chooses the late updates.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from offload.graph.taskgraph import Buffer, Role, Task, TaskGraph
from offload.lowering.host_updates import is_update
from offload.lowering.merging import held_in_order
from offload.optimizer.settings_snapshot import SettingsSnapshot
from offload.optimizer.step_updates import StepUpdate
from offload.optimizer.updates import Update
from offload.planning.cuts import crossing
from offload.program.kernels import Call, Calls, Program

NEVER = 1 << 60


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """Three graphs over the same buffers, which have the same numbers in all three."""

    first: TaskGraph
    steady: TaskGraph
    flush: TaskGraph
    late: int
    """The number of updates in `flush`."""
    updates: int
    """The number of updates in the whole step."""


def rotated(graph: TaskGraph, wanted: Collection[int]) -> Rotation | None:
    """The step with as many of the `wanted` updates late as possible; None if none can be."""
    if graph.program is None:
        return None  # the gradients would not survive between two runs
    late = _late(graph, wanted)
    if not late:
        return None
    prompt = [number for number in range(len(graph.tasks)) if number not in late]
    carried = _carried(graph, late)
    buffers = [_pending(b, x) if b in carried else x for b, x in enumerate(graph.buffers)]
    kept = SettingsSnapshot()
    ahead = [_with_kept(graph.tasks[number], kept) for number in _by_need(graph, late, prompt)]
    updates = updates_of(graph)
    count = len(updates.intersection(late))
    note = f"{count} of {len(updates)} updates run in the next forward pass"
    steady = graph.with_tasks([*ahead, *_moved(graph, prompt, len(ahead))], buffers, note)
    first = graph.with_tasks(_moved(graph, prompt, 0), buffers)
    flush = replace(graph.with_tasks(ahead, buffers), outputs=())
    whole, short = _programs(graph.program, [buffers[b] for b in sorted(carried)], kept)
    return Rotation(
        first=replace(first, program=whole),
        steady=replace(steady, program=whole),
        flush=replace(flush, program=short),
        late=count,
        updates=len(updates),
    )


def updates_of(graph: TaskGraph) -> set[int]:
    """The tasks that change a parameter, the optimizer's or handmade ones."""
    return {
        number
        for number, task in enumerate(graph.tasks)
        if task.phase == "update"
        and any(graph.buffers[b].role is Role.PARAMETER for b in task.writes)
        and is_update(task)
        and not any(isinstance(call.op, StepUpdate) for call in getattr(task.kernel, "calls", ()))
    }


def _late(graph: TaskGraph, wanted: Collection[int]) -> set[int]:
    """The late tasks: those of `wanted` that no prompt task follows and whose results nobody reads
    outside.

    A task that only scales one of their gradients in place, or casts it on the host, is late too:
    so what waits is smaller, or leaves the device only once."""
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
            and task.lane in ("compute", "host")
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
    return alone and (in_place or task.lane == "host")


def _first_reads(graph: TaskGraph, order: Iterable[int]) -> dict[int, int]:
    """For each buffer, the first place in this order where it is read."""
    first: dict[int, int] = {}
    for place, number in enumerate(order):
        for b in graph.tasks[number].reads:
            first.setdefault(b, place)
    return first


def _needed(graph: TaskGraph, number: int, first: Mapping[int, int]) -> int:
    """When the first parameter of a task is read."""
    written = [b for b in graph.tasks[number].writes if graph.buffers[b].role is Role.PARAMETER]
    return min((first.get(b, NEVER) for b in written), default=NEVER)


def _by_need(graph: TaskGraph, late: set[int], prompt: Sequence[int]) -> list[int]:
    """The late tasks, sorted by when their parameters are read; what they need comes before
    them."""
    first = _first_reads(graph, prompt)
    need = {number: _needed(graph, number, first) for number in late}
    needed = graph.dependencies()
    for number in sorted(late, reverse=True):
        for before in needed[number]:
            if before in late:
                need[before] = min(need[before], need[number])
    return sorted(late, key=lambda number: (need[number], number))


def _carried(graph: TaskGraph, late: set[int]) -> set[int]:
    """Buffers that carry values between two runs: a prompt task makes them, a late one reads
    them."""
    before = [task for number, task in enumerate(graph.tasks) if number not in late]
    found = crossing(before, (graph.tasks[number] for number in sorted(late)))
    return {b for b in found if not graph.buffers[b].persistent}


def _pending(b: int, buffer: Buffer) -> Buffer:
    name = f"pending.{b}.{buffer.name}"
    role = Role.SUM if buffer.role is Role.GRADIENT else Role.STATE
    return replace(buffer, name=name, role=role, tensor=name, start=0)


def _moved(graph: TaskGraph, numbers: Sequence[int], by: int) -> list[Task]:
    """These tasks, renumbered from `by` on. (No late task is in an `after`.)"""
    place = {old: new for new, old in enumerate(numbers, by)}
    return [
        replace(graph.tasks[old], after=tuple(place[a] for a in graph.tasks[old].after))
        for old in numbers
    ]


def _with_kept(task: Task, kept: SettingsSnapshot) -> Task:
    """The task with the optimizer's numbers of its own step."""
    kernel = task.kernel
    if isinstance(kernel, Calls):
        return replace(task, kernel=Calls(tuple(_call(call, kept) for call in kernel.calls)))
    return replace(task, kernel=_call(kernel, kept)) if isinstance(kernel, Call) else task


def _call(call: Call, kept: SettingsSnapshot) -> Call:
    if not isinstance(call.op, Update):
        return call
    kept.watch(call.op.optimizer, call.op.group, call.op.parameter)
    return replace(call, op=replace(call.op, kept=kept))


def _programs(
    program: Program, pending: Sequence[Buffer], kept: SettingsSnapshot
) -> tuple[Program, Program]:
    """The program of the steps, and that of the flush."""
    held = {b.tensor: torch.zeros(b.nbytes, dtype=torch.uint8) for b in pending}
    tensors = {**program.tensors, **held}
    steps = replace(
        program, tensors=tensors, recapture=None, after_step=(kept.keep, *program.after_step)
    )
    return steps, Program((), (), tensors, device=program.device)
