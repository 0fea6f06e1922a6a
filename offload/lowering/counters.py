"""Merges all step counters into one task.

    n1.add_(1)  ..  n2.add_(1)  ..  n3.add_(1)        ->        one task: n1 n2 n3

Each BatchNorm counts its batches in a number of its own, and nothing in the step reads it. So they
can be counted at any time, and all at once.
"""

from collections import Counter

from offload.graph.taskgraph import TaskGraph
from offload.lowering.merging import find_ordered_tasks, merge_groups, merge_key

LARGEST = 64
"""The most bytes of a counter."""


def fold_counters(graph: TaskGraph) -> TaskGraph:
    """Merge the tasks that each count up one small persistent number."""
    users = Counter(b for task in graph.tasks for b in task.touches)
    ordered = find_ordered_tasks(graph)
    counting: dict[tuple[object, ...], list[int]] = {}
    for number, task in enumerate(graph.tasks):
        if number in ordered or len(task.touches) != 1 or task.reads != task.writes:
            continue
        [b] = task.touches
        buffer = graph.buffers[b]
        if buffer.persistent and buffer.nbytes <= LARGEST and users[b] == 1:
            counting.setdefault(merge_key(task), []).append(number)
    folds = [group for group in counting.values() if len(group) > 1]
    folded = {number for group in folds for number in group}
    groups = [[number] for number in range(len(graph.tasks)) if number not in folded]
    groups = sorted([*groups, *folds], key=lambda group: group[-1])
    note = f"{len(folded)} counters are counted up by {len(folds)} tasks" if folded else ""
    return merge_groups(graph, groups, note)
