"""Merges several tasks into one that does what they did, in the same order.

    add: x -> y   gelu: y -> z   mul: z w -> z        one task: x w -> y z

If a member reads what an earlier member made anew, the merged task does not count it as a read. All
buffers that members write stay in the plan; only the number of tasks falls.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from offload.errors import GraphError
from offload.graph.taskgraph import UPDATE, Task, TaskGraph
from offload.program.kernels import Calls

Function = Callable[[Sequence[Any], Sequence[Any]], Any]


@dataclass(frozen=True, slots=True)
class Functions:
    """Runs `fn(reads, writes)` kernels in a row. It keeps the buffer numbers that it was made with.
    Views are given by position, so buffers may be renamed later."""

    parts: tuple[tuple[Function, tuple[int, ...], tuple[int, ...]], ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]

    def __call__(self, reads: Sequence[Any], writes: Sequence[Any]) -> None:
        views = {**dict(zip(self.reads, reads, strict=True))}
        views.update(zip(self.writes, writes, strict=True))
        for function, read, written in self.parts:
            function([views[b] for b in read], [views[b] for b in written])


def merge_key(task: Task) -> tuple[object, ...]:
    """Tasks with equal keys can be merged, and so can those that differ only in the first part."""
    return (task.phase, task.lane, task.device, task.turn, task.lap, _kind(task.kernel))


def is_ordered(task: Task) -> bool:
    return bool(task.after) or task.random


def find_ordered_tasks(graph: TaskGraph) -> frozenset[int]:
    """Tasks that buffers alone do not order: they draw random numbers, or are in an `after`."""
    return frozenset(
        number
        for at, task in enumerate(graph.tasks)
        for number in ((at, *task.after) if is_ordered(task) else ())
    )


def merge_tasks(members: Sequence[Task], name: str = "") -> Task:
    """One task that does what `members` do. Its `after` still names tasks of the old graph;
    `merge_groups` puts that right."""
    first = members[0]
    if len({merge_key(task)[1:] for task in members}) > 1:
        raise GraphError(f"{[task.name for task in members]} differ in kind and cannot be merged")
    reads, writes = _outside_uses(members)
    seconds = [task.seconds for task in members]
    return replace(
        first,
        name=name or f"{first.name}+{len(members) - 1}",
        reads=reads,
        writes=writes,
        after=tuple(sorted({a for task in members for a in task.after})),
        workspace=max(task.workspace for task in members),
        unplaced=max(task.unplaced for task in members),
        flops=sum(task.flops for task in members),
        traffic=sum(task.traffic for task in members),
        seconds=sum(s for s in seconds if s is not None) if None not in seconds else None,
        phase=UPDATE if any(task.phase == UPDATE for task in members) else first.phase,
        random=any(task.random for task in members),
        repeatable=all(task.repeatable for task in members) and not {*reads} & {*writes},
        pointwise=all(task.pointwise for task in members),
        recomputes="",
        kernel=_join_kernels(members, reads, writes),
        where=_lines(members),
    )


def _lines(members: Sequence[Task]) -> str:
    """The user's lines of the first and the last member: an error comes from these lines, or from
    between them."""
    return " to ".join(
        dict.fromkeys(task.where for task in (members[0], members[-1]) if task.where)
    )


def merge_groups(graph: TaskGraph, groups: Sequence[Sequence[int]], note: str = "") -> TaskGraph:
    """The graph with each group of tasks merged, in the order of the groups."""
    if len(groups) == len(graph.tasks) and all(n == old for n, [old] in enumerate(groups)):
        return graph
    place = {old: new for new, group in enumerate(groups) for old in group}
    tasks = []
    for new, group in enumerate(groups):
        members = [graph.tasks[old] for old in group]
        task = members[0] if len(members) == 1 else merge_tasks(members)
        after = tuple(sorted({place[a] for a in task.after} - {new}))
        tasks.append(task if after == task.after else replace(task, after=after))
    return graph.with_tasks(tasks, None, note)


def _outside_uses(members: Sequence[Task]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    reads: dict[int, None] = {}
    writes: dict[int, None] = {}
    for task in members:
        reads.update((b, None) for b in task.reads if b not in writes)
        writes.update((b, None) for b in task.writes)
    return tuple(reads), tuple(writes)


def _join_kernels(members: Sequence[Task], reads: tuple[int, ...], writes: tuple[int, ...]) -> Any:
    kind = _kind(members[0].kernel)
    if kind == "calls":
        return Calls(tuple(chain.from_iterable(task.kernel.calls for task in members)))
    if kind == "function":
        parts = tuple((task.kernel, task.reads, task.writes) for task in members)
        return Functions(parts, reads, writes)
    return None


def _kind(kernel: Any) -> str:
    if kernel is None:
        return "none"
    return "calls" if hasattr(kernel, "calls") else "function"
