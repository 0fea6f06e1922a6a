"""Splits the update of a large parameter: the largest task sets the smallest budget.

    u: p g m v -> p m v      ->      u 1/3: p g m0 v0 -> p m0 v0    u 2/3: p g m1 v1 -> ..    ..

The optimizer's state is cut into buffers of its own, because only the update touches it. In host
memory they lie side by side, so the user's tensor stays whole. Parameter and gradient are not cut.
Every element goes through the same arithmetic, so every bit is the same.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from offload.graph.memgraph import ALIGNMENT
from offload.graph.taskgraph import Buffer, Task, TaskGraph
from offload.lowering.whole_values import whole
from offload.optimizer.step_updates import StepUpdate
from offload.optimizer.updates import Update, chunk_borders, is_sliceable, sliced
from offload.program.kernels import CPU, Call, Value, device_of

ON_HOST, ON_DEVICE = 32 << 20, 256 << 20
"""A GPU's kernels give 65,536 elements to a block, so small chunks would leave most of it idle."""


def update_bytes(graph: TaskGraph) -> int:
    """The most bytes that a task with updates touches."""
    return ON_HOST if device_of(graph) == CPU else ON_DEVICE


def split_updates(graph: TaskGraph, nbytes: int | None = None) -> TaskGraph:
    """Split updates that touch more than `nbytes` into chunks."""
    nbytes = nbytes or update_bytes(graph)
    users: dict[int, list[int]] = {}
    for number, task in enumerate(graph.tasks):
        for b in task.touches:
            users.setdefault(b, []).append(number)
    buffers = list(graph.buffers)
    tasks: list[Task] = []
    last: list[int] = []
    split = 0
    for task in graph.tasks:
        if task.after:
            task = replace(task, after=tuple(last[a] for a in task.after))
        large = sum(graph.buffers[b].nbytes for b in task.touches) > nbytes
        states = _states(graph, task, users) if large else ()
        chunks = _chunks(task, states, buffers, nbytes) if states else [task]
        split += len(chunks) > 1
        tasks.extend(chunks)
        last.append(len(tasks) - 1)
    note = f"{split} updates are cut into {len(tasks) - len(last) + split} chunks" if split else ""
    return graph.with_tasks(tasks, buffers, note)


def _states(graph: TaskGraph, task: Task, users: dict[int, list[int]]) -> Sequence[Value]:
    """The states that can be cut: those with as many elements as the parameter, in the same order,
    that no other task uses."""
    call = task.kernel
    if not isinstance(call, Call) or not isinstance(call.op, Update | StepUpdate):
        return ()
    if not call.op.elementwise or not is_sliceable(call):
        return ()
    states = call.args[2:]
    ours = all(
        len(users[state.buffer]) == 1
        and state.buffer not in graph.outputs
        and whole(state, graph.buffers[state.buffer].nbytes)
        for state in states
    )
    return states if ours else ()


def _chunks(
    task: Task, states: Sequence[Value], buffers: list[Buffer], nbytes: int
) -> Sequence[Task]:
    """Tasks that update a chunk each. The chunk's states become buffers of their own.

    Parameter and gradient count as a part of `nbytes`; the states get the rest of it, but at least
    a quarter."""
    parameter, gradient = task.kernel.args[:2]
    numel = math.prod(parameter.size)
    both = buffers[parameter.buffer].nbytes + buffers[gradient.buffer].nbytes
    element = sum(state.dtype.itemsize for state in states)
    borders = chunk_borders(numel, max(nbytes - both, nbytes // 4, ALIGNMENT * element) // element)
    chunks: list[Task] = []
    for start, stop in pairwise(borders):
        parts = [_part(buffers, state, start, stop) for state in states]
        own = {state.buffer: part.buffer for state, part in zip(states, parts, strict=True)}
        share = (stop - start) / numel
        chunks.append(
            replace(
                task,
                name=f"{task.name} {len(chunks) + 1}/{len(borders) - 1}",
                reads=tuple(own.get(b, b) for b in task.reads),
                writes=tuple(own.get(b, b) for b in task.writes),
                flops=task.flops * share,
                traffic=int(task.traffic * share),
                seconds=None if task.seconds is None else task.seconds * share,
                kernel=sliced(task.kernel, start, stop, parts),
            )
        )
    return chunks


def _part(buffers: list[Buffer], state: Value, start: int, stop: int) -> Value:
    """Make a buffer for the elements [start, stop) of a state."""
    of = buffers[state.buffer]
    size = state.dtype.itemsize
    buffers.append(
        replace(
            of,
            name=f"{of.name}[{start}:{stop}]",
            nbytes=(stop - start) * size,
            start=of.start + start * size,
        )
    )
    return Value(len(buffers) - 1, state.dtype, (stop - start,), (1,))
