"""Adds into a summand that is not read again: two buffers live at a time instead of three.

    c = add(a, b), a is not read again      ->      a.add_(b), and later tasks read a instead of c

Such a task adds the second gradient of a tied weight to the first, and every residual branch. a + b
equals b + a to the last bit, so either summand may be overwritten.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from offload.graph.taskgraph import Role, Task, TaskGraph
from offload.program.kernels import Call, Value


@dataclass(frozen=True, slots=True)
class _Sum:
    """into += other, instead of result = into + other."""

    into: Value
    other: Value
    result: Value
    call: Call


def add_in_place(graph: TaskGraph, nbytes: int = 1 << 20) -> TaskGraph:
    """Make sums of at least `nbytes` in the buffer of a summand that dies with them."""
    first, last = graph.spans()
    stays = {*graph.outputs}
    stays.update(b for b, of in enumerate(graph.buffers) if of.persistent or of.role is Role.INPUT)
    buffers = list(graph.buffers)
    names: dict[int, int] = {}
    tasks: list[Task] = []

    def fits(way: _Sum, number: int) -> bool:
        into, result = way.into.buffer, way.result.buffer
        return (
            buffers[into].nbytes == buffers[result].nbytes >= nbytes
            and last[into] == number == first[result]
            and stays.isdisjoint((into, result))
            and way.into.fills(buffers[into].nbytes)
        )

    for number, task in enumerate(graph.tasks):
        if not names.keys().isdisjoint(task.touches):
            task = task.rename(names)
        way = next((way for way in _ways(task) if fits(way, number)), None)
        if way is not None:
            into, result = way.into.buffer, way.result.buffer
            names[result] = into
            last[into] = last[result]
            buffers[into] = replace(buffers[into], role=buffers[result].role)
            task = replace(
                task, writes=(into,), unplaced=0, repeatable=False, kernel=_call_in_place(way)
            )
        tasks.append(task)
    note = f"{len(names)} sums are made in the buffer of a summand" if names else ""
    return graph.with_tasks(tasks, buffers, note)


def _call_in_place(way: _Sum) -> Call:
    return Call(torch.ops.aten.add_.Tensor, (way.into, way.other), way.call.kwargs)


def _ways(task: Task) -> Sequence[_Sum]:
    """The ways to add in place: into the first summand or into the second."""
    call = task.kernel
    if not isinstance(call, Call) or call.of_torch is not torch.ops.aten.add.Tensor:
        return ()
    if len(call.args) != 2 or len(call.outputs) != 1 or getattr(call.op, "varying", ()):
        return ()
    (a, b), [result] = call.args, call.outputs
    if not (isinstance(a, Value) and isinstance(b, Value) and isinstance(result, Value)):
        return ()
    if len({(v.dtype, v.size, v.stride) for v in (a, b, result)}) > 1:
        return ()
    if len({a.buffer, b.buffer, result.buffer}) < 3 or task.writes != (result.buffer,):
        return ()
    either = call.kwargs.get("alpha", 1) == 1
    return (_Sum(a, b, result, call), *((_Sum(b, a, result, call),) if either else ()))
