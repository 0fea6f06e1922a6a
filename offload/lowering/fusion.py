"""Compiles chains of small kernels into one. By name only: the last bits differ from eager's.

    pow mul add mul tanh add mul | mm | add layer_norm | mm      ->      fused | mm | fused | mm

A region is a connected group of neighbouring tasks that only make new tensors: pointwise ones,
reductions, norms, softmaxes. Excluded are writes in place, random draws, updates, and tasks that
read a part of what another one made. Only what is read outside of the region is written to memory
and planned. (`pointwise_groups` groups tasks too, but it keeps every bit, kernel and tensor.)

A region that cannot be compiled stays as it was, and a note names it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch

from offload.graph.taskgraph import Task, TaskGraph
from offload.lowering.compiled_regions import Fused, Region, compiled, reshaped, returns
from offload.lowering.dead_tasks import without_views_and_dead
from offload.lowering.merging import held_in_order, kin
from offload.program.kernels import CPU, Call, Value
from offload.torch_seams import OpOverload, pytree, schema_of, softmax, softmax_backward, to_copy

MOST = 32
"""The most tasks of a region: larger ones take long to compile and hold many tensors at once."""
NAMED = 3
"""The most regions whose failure a note explains."""

Compile = Callable[[Region, torch.device], Fused]
Outside = Callable[[int], bool]
aten = torch.ops.aten
BESIDES_POINTWISE = (
    softmax,
    softmax_backward,
    to_copy,
    aten.clone.default,
    aten.full_like.default,
    aten.mean.dim,
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    aten.ones_like.default,
    aten.sum.dim_IntList,
    aten.zeros_like.default,
)


def fused(
    graph: TaskGraph,
    compile: Compile = compiled,
    clock: Callable[[], float] = time.perf_counter,
) -> TaskGraph:
    """Compile the graph's chains of small kernels. It takes seconds for each different chain."""
    graph = without_views_and_dead(graph)
    begin, work = clock(), _Work(graph, compile)
    tasks: list[Task] = []
    place: dict[int, int] = {}
    for group in _groups(graph):
        one = work.fused(group) if len(group) > 1 else None
        for number in group:
            place[number] = len(tasks)
            if one is None:
                task = graph.tasks[number]
                tasks.append(replace(task, after=tuple(place[a] for a in task.after)))
        if one is not None:
            tasks.append(one)
    notes = work.notes(len(graph.tasks) - len(tasks), clock() - begin)
    return graph.with_tasks(tasks, None, *notes)


@dataclass(slots=True, eq=False)
class _Work:
    """The regions that were compiled so far."""

    graph: TaskGraph
    compile: Compile
    known: dict[Any, Fused | str] = field(default_factory=dict)
    """By region: its compiled code, or why it could not be compiled."""
    regions: int = 0
    failed: list[str] = field(default_factory=list)
    users: dict[int, set[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number, task in enumerate(self.graph.tasks):
            for b in task.reads:
                self.users.setdefault(b, set()).add(number)

    def fused(self, group: Sequence[int]) -> Task | None:
        """The group as one compiled task; None if it cannot be compiled."""
        members = [self.graph.tasks[n] for n in group]
        inputs, outputs = self._inputs(members), self._outputs(group, members)
        region = _renumbered(members, inputs, outputs)
        found = self._compiled(region)
        name = f"{members[0].name}*{len(members)}"
        if isinstance(found, str):
            self.failed.append(f"fused: {name} stays {len(members)} tasks: {found}")
            return None
        self.regions += 1
        return replace(
            members[0],
            name=name,
            reads=tuple(dict.fromkeys(value.buffer for value in inputs)),
            writes=tuple(value.buffer for value in outputs),
            flops=sum(task.flops for task in members),
            traffic=sum(map(_nbytes, (*inputs, *outputs))),
            repeatable=all(task.repeatable for task in members),
            pointwise=False,
            kernel=Call(found, inputs, {}, outputs),
        )

    def _inputs(self, members: Sequence[Task]) -> tuple[Value, ...]:
        written = {b for task in members for b in task.writes}
        values = (value for task in members for value in _values(task.kernel))
        return tuple(dict.fromkeys(value for value in values if value.buffer not in written))

    def _outputs(self, group: Sequence[int], members: Sequence[Task]) -> tuple[Value, ...]:
        """What the group makes that is read outside of it."""
        inside, returned = set(group), set(self.graph.outputs)
        return tuple(
            value
            for task in members
            for value in task.kernel.outputs
            if value is not None
            and (value.buffer in returned or self.users.get(value.buffer, set()) - inside)
        )

    def _compiled(self, region: Region) -> Fused | str:
        key = region.key
        if key not in self.known:
            program = self.graph.program
            try:
                device = CPU if program is None else program.device
                self.known[key] = self.compile(region, device)
            except Exception as error:  # compilers raise anything; a note reports it
                lines = str(error).strip().splitlines()
                self.known[key] = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
        return self.known[key]

    def notes(self, fewer: int, seconds: float) -> Iterator[str]:
        different = sum(isinstance(found, Fused) for found in self.known.values())
        if self.regions:
            yield (
                f"fused: {fewer + self.regions} tasks are {self.regions} compiled regions"
                f" ({different} different, {seconds:.1f} s to compile); the last bits differ"
            )
        elif not self.failed:
            yield "fused: the graph has no two neighbouring small kernels"
        yield from self.failed[:NAMED]
        if len(self.failed) > NAMED:
            yield f"fused: {len(self.failed) - NAMED} more regions could not be compiled"


def _groups(graph: TaskGraph) -> Iterator[list[int]]:
    """The tasks in an order in which they may run, with regions as groups."""
    held = held_in_order(graph)
    written: dict[int, int] = {}
    for task in graph.tasks:
        for b in task.writes:
            written[b] = written.get(b, 0) + 1
    able = [
        number not in held and _able(graph, task, written)
        for number, task in enumerate(graph.tasks)
    ]
    run: list[int] = []
    for number, task in enumerate(graph.tasks):
        if run and not (able[number] and kin(task) == kin(graph.tasks[run[0]])):
            yield from _connected(graph, run)
            run = []
        if able[number]:
            run.append(number)
        else:
            yield [number]
    yield from _connected(graph, run)


def _able(graph: TaskGraph, task: Task, written: dict[int, int]) -> bool:
    """Whether the task only makes new tensors, each a whole buffer."""
    call = task.kernel
    if not isinstance(call, Call) or task.lane != "compute" or task.phase == "update":
        return False
    op = call.op
    if not isinstance(op, OpOverload) or schema_of(op).is_mutable:
        return False
    if torch.Tag.pointwise not in op.tags and op not in BESIDES_POINTWISE:
        return False
    if len(call.outputs) != len(returns(op)) or any(r.alias_info for r in returns(op)):
        return False
    outputs = [value for value in call.outputs if value is not None]
    return (
        sorted(value.buffer for value in outputs) == sorted(task.writes)
        and all(written[b] == 1 and not graph.buffers[b].persistent for b in task.writes)
        and all(value.offset == 0 for value in outputs)
        and not {*task.reads} & {*task.writes}
    )


def _connected(graph: TaskGraph, run: Sequence[int]) -> Iterator[list[int]]:
    """Group tasks of a run that read each other's results. A task that joins several groups makes
    them one. So a group reads only results of earlier groups."""
    groups: list[list[int]] = []
    of: dict[int, list[int]] = {}
    made: dict[int, tuple[int, Value]] = {}
    """By buffer: the task of the run that made it, and the value it made."""
    for number in run:
        call = graph.tasks[number].kernel
        read = [(made[v.buffer], v) for v in _values(call) if v.buffer in made]
        makers = {id(of[maker]): of[maker] for (maker, _), _ in read}
        joined = sorted(n for group in makers.values() for n in group)
        if all(reshaped(value, whole) for (_, whole), value in read) and len(joined) < MOST:
            groups = [group for group in groups if id(group) not in makers]
        else:  # its inputs must be in memory, so no later group may move before it
            yield from groups
            groups, joined, made, of = [], [], {}, {}
        groups.append([*joined, number])
        of.update(dict.fromkeys(groups[-1], groups[-1]))
        made.update((v.buffer, (number, v)) for v in call.outputs if v is not None)
    yield from groups


def _renumbered(
    members: Sequence[Task], inputs: Sequence[Value], outputs: Sequence[Value]
) -> Region:
    names: dict[int, int] = {}
    for value in inputs:
        names.setdefault(value.buffer, len(names))
    for task in members:
        for b in task.writes:
            names.setdefault(b, len(names))
    return Region(
        tuple(task.kernel.renamed(names) for task in members),
        tuple(value.renamed(names) for value in inputs),
        tuple(value.renamed(names) for value in outputs),
    )


def _values(call: Call) -> list[Value]:
    leaves = pytree.tree_leaves((call.args, dict(call.kwargs)), is_leaf=_is_value)
    return [leaf for leaf in leaves if _is_value(leaf)]


def _is_value(leaf: Any) -> bool:
    return isinstance(leaf, Value)


def _nbytes(value: Value) -> int:
    return prod(value.size) * value.dtype.itemsize
