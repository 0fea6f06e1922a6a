"""Orders everything that outlives a step after the step's checks.

    check   update  update    each update waits for the last check; checks wait for one another

A check that fails ends the step, which is then made by another graph. So nothing may have changed
by then.
"""

from dataclasses import replace
from heapq import heapify, heappop, heappush

from offload.errors import GraphError
from offload.graph.taskgraph import TaskGraph


def checks_first(graph: TaskGraph) -> TaskGraph:
    """Have every task that writes a persistent buffer wait for the last check."""
    checks = [number for number, task in enumerate(graph.tasks) if task.checks]
    if not checks:
        return graph
    lasting = {b for b, buffer in enumerate(graph.buffers) if buffer.persistent}
    needed = [{*before} for before in graph.dependencies()]
    waiting = [n for n, task in enumerate(graph.tasks) if not lasting.isdisjoint(task.writes)]
    for number in waiting:
        needed[number].add(checks[-1])
    order = _ordered(needed)
    if len(order) < len(graph.tasks):
        raise GraphError("a check depends on a task that writes what outlives the step")
    place = {old: new for new, old in enumerate(order)}
    tasks = [graph.tasks[old] for old in order]
    late = {*waiting}
    return graph.with_tasks(
        [
            replace(
                task,
                after=tuple(
                    sorted({place[a] for a in (*task.after, *checks[-1:] * (old in late))})
                ),
            )
            for old, task in zip(order, tasks, strict=True)
        ]
    )


def _ordered(needed: list[set[int]]) -> list[int]:
    """The tasks in their order, but for those that have to wait."""
    after: list[list[int]] = [[] for _ in needed]
    for number, before in enumerate(needed):
        for one in before:
            after[one].append(number)
    left = [len(before) for before in needed]
    ready = [number for number, count in enumerate(left) if not count]
    heapify(ready)
    order: list[int] = []
    while ready:
        number = heappop(ready)
        order.append(number)
        for later in after[number]:
            left[later] -= 1
            if not left[later]:
                heappush(ready, later)
    return order
