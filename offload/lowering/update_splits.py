"""Splits the update of a large parameter: the largest task sets the smallest budget.

    u: p g m v -> p m v      ->      u 1/3: p g m0 v0 -> p m0 v0    u 2/3: p g m1 v1 -> ..    ..

State is cut into buffers of its own, because only the update touches it, and so is what the update
makes for itself. At home the pieces lie side by side, so the user's tensor stays whole. Parameter
and gradient are not cut. Every element goes through the same arithmetic, so every bit is the same.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

import torch

from offload.graph.taskgraph import UPDATE, Buffer, Role, Task, TaskGraph
from offload.lowering.merging import find_ordered_tasks
from offload.lowering.whole_updates import is_elementwise
from offload.program.kernels import CPU, Call, Calls, Value, device_of, values_in

ON_HOST, ON_DEVICE = 32 << 20, 256 << 20
"""The most bytes that an update touches. A GPU's kernels give 65,536 elements to a block, so small
pieces would leave most of it idle."""
LEAST = 8
"""If all other tasks touch fewer bytes, an update touches no more than the largest of them, but
may always touch 1 / LEAST of the above."""
PIECE = 4096
"""Pieces end at multiples of so many elements: kernels round the last elements, those that fill no
whole vector, differently from the others."""
EXACT = frozenset({torch.float32, torch.float64})
"""Types that a CPU rounds alike wherever in a tensor they lie."""


def most_bytes(graph: TaskGraph) -> int:
    """The most bytes that a task with updates should touch."""
    most = ON_HOST if device_of(graph) == CPU else ON_DEVICE
    others = (task for task in graph.tasks if task.phase != UPDATE)
    largest = max((_bytes(graph, task) for task in others), default=0)
    return max(most // LEAST, min(most, largest))


def _bytes(graph: TaskGraph, task: Task) -> int:
    return sum(graph.buffers[b].nbytes for b in task.touches)


def split_updates(graph: TaskGraph, nbytes: int | None = None) -> TaskGraph:
    """Split updates that touch more than `nbytes` into chunks."""
    nbytes = nbytes or most_bytes(graph)
    ordered = find_ordered_tasks(graph)
    users: dict[int, int] = {}
    for task in graph.tasks:
        for b in task.touches:
            users[b] = users.get(b, 0) + 1
    buffers = list(graph.buffers)
    tasks: list[Task] = []
    last: list[int] = []
    split = 0
    for number, task in enumerate(graph.tasks):
        if task.after:
            task = replace(task, after=tuple(last[a] for a in task.after))
        large = _bytes(graph, task) > nbytes
        update = _update(graph, task, users) if large and number not in ordered else None
        chunks = _chunks(update, buffers, nbytes) if update else [task]
        split += len(chunks) > 1
        tasks.extend(chunks)
        last.append(len(tasks) - 1)
    note = f"{split} updates are cut into {len(tasks) - len(last) + split} chunks" if split else ""
    return graph.with_tasks(tasks, buffers, note)


@dataclass(frozen=True, slots=True)
class _Update:
    """An update that can be cut."""

    task: Task
    once: Sequence[Call]
    """Calls on single numbers, such as those that count steps. They come first."""
    calls: Sequence[Call]
    numel: int
    cut: Mapping[int, Buffer]
    """The buffers that nobody else touches."""
    uncut: int
    """Bytes of the others."""


def _update(graph: TaskGraph, task: Task, users: Mapping[int, int]) -> _Update | None:
    """How to cut a task; None if the pieces might give other bits than the whole."""
    if task.phase != UPDATE or task.lane != "compute" or not is_elementwise(task):
        return None
    calls: Sequence[Call] = task.kernel.calls
    large = [any(prod(v.size) > 1 for v in _values(call)) for call in calls]
    first = large.index(True) if True in large else len(large)
    if not all(large[first:]):
        return None
    values = [v for call in calls for v in _values(call) if prod(v.size) > 1]
    exact = device_of(graph) != CPU or all(v.dtype in EXACT for v in values)
    if not exact or len({(v.size, v.stride) for v in values}) != 1 or not _is_dense(values[0]):
        return None
    if any(_has_sizes(call) for call in calls[first:]):
        return None
    cut = {
        v.buffer: buffer
        for v in values
        if users[v.buffer] == 1
        and (buffer := graph.buffers[v.buffer]).role in (Role.STATE, Role.TEMPORARY)
        and v.buffer not in graph.outputs
        and v.fills(buffer.nbytes)
    }
    uncut = sum(graph.buffers[b].nbytes for b in task.touches if b not in cut)
    numel = prod(values[0].size)
    return _Update(task, calls[:first], calls[first:], numel, cut, uncut) if cut else None


def _values(call: Call) -> Iterator[Value]:
    yield from values_in((*call.args, *call.kwargs.values(), *call.outputs))


def _has_sizes(call: Call) -> bool:
    """Whether an argument says how large the result is."""
    nests = (arg for arg in (*call.args, *call.kwargs.values()) if isinstance(arg, tuple | list))
    return any(type(leaf) is int for nest in nests for leaf in nest)


def _is_dense(value: Value) -> bool:
    step = 1
    for stride, size in sorted(zip(value.stride, value.size, strict=True)):
        if size > 1:
            if stride != step:
                return False
            step *= size
    return step == prod(value.size)


def _chunks(update: _Update, buffers: list[Buffer], nbytes: int) -> Sequence[Task]:
    """Tasks that update a chunk each.

    What is not cut counts as a part of `nbytes`; the rest is for the chunks, but at least a
    quarter."""
    element = sum(buffer.nbytes for buffer in update.cut.values()) / update.numel
    most = int(max(nbytes - update.uncut, nbytes // 4) / element)
    step = max(most - most % PIECE, PIECE)
    borders = [*range(0, update.numel, step), update.numel]
    task, chunks = update.task, list[Task]()
    for b, of in update.cut.items():
        buffers[b] = replace(of, role=Role.TEMPORARY)  # nobody touches it any more
    for start, stop in pairwise(borders):
        share = (stop - start) / update.numel
        parts = {b: _add_part(buffers, of, start, stop, update) for b, of in update.cut.items()}
        calls = [_slice_call(call, start, stop, parts) for call in update.calls]
        chunks.append(
            replace(
                task,
                name=f"{task.name} {len(chunks) + 1}/{len(borders) - 1}",
                reads=tuple(parts.get(b, b) for b in task.reads),
                writes=tuple(parts.get(b, b) for b in task.writes),
                flops=task.flops * share,
                traffic=int(task.traffic * share),
                seconds=None if task.seconds is None else task.seconds * share,
                kernel=Calls((*(update.once if not start else ()), *calls)),
            )
        )
    return chunks


def _add_part(buffers: list[Buffer], of: Buffer, start: int, stop: int, update: _Update) -> int:
    """Make a buffer for the elements [start, stop)."""
    item = of.nbytes // update.numel
    name = f"{of.name}[{start}:{stop}]"
    begin = of.start + start * item if of.persistent else 0
    buffers.append(replace(of, name=name, nbytes=(stop - start) * item, start=begin))
    return len(buffers) - 1


def _slice_call(call: Call, start: int, stop: int, parts: Mapping[int, int]) -> Call:
    """The call for the elements [start, stop), counted in the order of memory."""
    part = _value_slicer(start, stop, parts)
    args, kwargs = call.arguments(part)
    outputs = tuple(None if v is None else part(v) for v in call.outputs)
    return replace(call, args=args, kwargs=kwargs, outputs=outputs)


def _value_slicer(start: int, stop: int, parts: Mapping[int, int]) -> Callable[[Value], Value]:
    def part(value: Value) -> Value:
        if prod(value.size) == 1:
            return value
        if value.buffer in parts:
            return Value(parts[value.buffer], value.dtype, (stop - start,), (1,))
        return replace(value, size=(stop - start,), stride=(1,), offset=value.offset + start)

    return part
