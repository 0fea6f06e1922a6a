"""All step counters are one task.

    n1.add_(1)  ..  n2.add_(1)  ..  n3.add_(1)        ->        one task: n1 n2 n3

BatchNorm counts its batches in a number of its own each; nothing in the step reads it. So they may
be counted at any time, and all at once.
"""

from collections import Counter

from offload.lowering.merging import held_in_order, kin, regrouped
from offload.taskgraph import TaskGraph

LARGEST = 64
"""Bytes of a counter, at most."""


def fold_counters(graph: TaskGraph) -> TaskGraph:
    """The graph with one task for the small persistent numbers that one task each counts up."""
    users = Counter(b for task in graph.tasks for b in task.touches)
    held = held_in_order(graph)
    counting: dict[tuple[object, ...], list[int]] = {}
    for number, task in enumerate(graph.tasks):
        if number in held or len(task.touches) != 1 or task.reads != task.writes:
            continue
        [b] = task.touches
        buffer = graph.buffers[b]
        if buffer.persistent and buffer.nbytes <= LARGEST and users[b] == 1:
            counting.setdefault(kin(task), []).append(number)
    folds = [group for group in counting.values() if len(group) > 1]
    folded = {number for group in folds for number in group}
    groups = [[number] for number in range(len(graph.tasks)) if number not in folded]
    groups = sorted([*groups, *folds], key=lambda group: group[-1])
    note = f"{len(folded)} counters are counted by {len(folds)} tasks" if folded else ""
    return regrouped(graph, groups, note)
