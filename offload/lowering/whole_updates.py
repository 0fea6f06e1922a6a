"""Merges all that updates one parameter into one task.

    lerp_(m, g)  mul_(v)  addcmul_(v, g)  sqrt(v) -> t  addcdiv_(p, m, t)   ->   u: p g m v -> p m v

Otherwise each of them would run as early as it may (early_updates.py), far from the others, and a
state that does not stay on the device would come in once for each. Tasks belong together if they
work element by element and share a parameter that they write, or a state or temporary that nobody
else touches.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import pairwise

from offload.graph.taskgraph import BACKWARD, UPDATE, Role, Task, TaskGraph
from offload.lowering.merging import find_ordered_tasks, merge_groups

COUNTER = 64
"""The most bytes of a counter, which may be one for all parameters."""
SHARED = frozenset({Role.STATE, Role.TEMPORARY, Role.ACTIVATION, Role.GRADIENT})


def merge_whole_updates(graph: TaskGraph) -> TaskGraph:
    """Merge the tasks of each parameter's update."""
    groups = _groups(graph)
    if not groups:
        return graph
    order = _order_groups(graph, groups)
    merged = merge_groups(graph, order)
    together = [number for number, group in enumerate(order) if len(group) > 1]
    if not together:
        return merged
    tasks = [*merged.tasks]
    for number in together:
        tasks[number] = replace(tasks[number], name=_name(graph, tasks[number]))
    count = sum(len(order[number]) for number in together)
    return merged.with_tasks(tasks, None, f"{count} tasks make {len(together)} updates")


def _name(graph: TaskGraph, task: Task) -> str:
    """`conv1.weight.update`, or `conv1.weight.update+2` if it is one of three parameters."""
    buffers = [graph.buffers[b] for b in task.writes]
    first, *others = [b.name for b in buffers if b.role is Role.PARAMETER] or [buffers[0].name]
    return f"{first}.update{f'+{len(others)}' if others else ''}"


def is_elementwise(task: Task) -> bool:
    """Whether each of its kernels treats every element alike."""
    calls = getattr(task.kernel, "calls", ())
    return bool(calls) and all(getattr(call.op, "elementwise", False) for call in calls)


def _groups(graph: TaskGraph) -> list[list[int]]:
    ordered = find_ordered_tasks(graph)
    able = {
        number
        for number, task in enumerate(graph.tasks)
        if task.phase != BACKWARD and number not in ordered and is_elementwise(task)
    }
    users: dict[int, list[int]] = {}
    for number, task in enumerate(graph.tasks):
        for b in task.touches:
            users.setdefault(b, []).append(number)
    group_of = {number: [number] for number in able}
    for b, numbers in users.items():
        for first, second in _pairs(graph, b, numbers, able):
            group, other = group_of[first], group_of[second]
            if group is not other:
                group += other
                group_of.update(dict.fromkeys(other, group))
    groups = {id(group): sorted(group) for group in group_of.values() if len(group) > 1}
    return [group for group in groups.values() if _is_update(graph, group)]


def _pairs(
    graph: TaskGraph, b: int, users: Sequence[int], able: set[int]
) -> Iterator[tuple[int, int]]:
    """Neighbours among the tasks that belong together because of this buffer."""
    buffer = graph.buffers[b]
    together: list[int] = []
    if buffer.nbytes > COUNTER and buffer.role is Role.PARAMETER:
        together = [n for n in users if n in able and b in graph.tasks[n].writes]
    elif buffer.nbytes > COUNTER and buffer.role in SHARED and able.issuperset(users):
        together = [*users]
    yield from pairwise(together)


def _is_update(graph: TaskGraph, group: Sequence[int]) -> bool:
    members = [graph.tasks[number] for number in group]
    alike = len({(task.lane, task.device, task.turn) for task in members}) == 1
    return alike and any(task.phase == UPDATE for task in members)


def _order_groups(graph: TaskGraph, groups: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """All tasks, each group at the place of its last member. A group falls apart if another task
    has to run between its members."""
    needed = graph.dependencies()
    while True:
        merged = {number for group in groups for number in group}
        every = [*groups, *([n] for n in range(len(needed)) if n not in merged)]
        every.sort(key=lambda group: group[-1])
        order = _sort_groups(every, needed)
        if len(order) == len(every):
            return order
        done = set(map(id, order))
        stuck = next(group for group in every if len(group) > 1 and id(group) not in done)
        groups = [group for group in groups if group is not stuck]


def _sort_groups(
    groups: Sequence[Sequence[int]], needed: Sequence[Sequence[int]]
) -> list[Sequence[int]]:
    """The groups in an order that keeps what they need, as near to theirs as can be. Groups in a
    cycle, and those that need them, are left out."""
    place = {number: at for at, group in enumerate(groups) for number in group}
    before = [{place[n] for number in group for n in needed[number]} - {at}
              for at, group in enumerate(groups)]  # fmt: skip
    after: list[list[int]] = [[] for _ in groups]
    for at, others in enumerate(before):
        for other in others:
            after[other].append(at)
    left = [len(others) for others in before]
    ready = [at for at, count in enumerate(left) if not count]
    heapify(ready)
    order: list[Sequence[int]] = []
    while ready:
        at = heappop(ready)
        order.append(groups[at])
        for later in after[at]:
            left[later] -= 1
            if not left[later]:
                heappush(ready, later)
    return order
