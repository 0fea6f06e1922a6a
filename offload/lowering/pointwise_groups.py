"""Groups small neighbouring pointwise tasks, so that a task's overhead is paid once a group.

    to_copy  mul  add | mm | gelu  mul        ->        to_copy+2 | mm | gelu+1

A group stays small, in tasks and in bytes, and needs no more room than the largest task.
The tensors between its members stay in the plan.
"""

from collections.abc import Collection

from offload.graph.memgraph import SMALL_WORKSPACE
from offload.graph.taskgraph import TaskGraph
from offload.lowering.merging import find_ordered_tasks, merge_groups, merge_key


def group_tasks(
    graph: TaskGraph, at_most: int = 16, nbytes: int = 256 << 10, *, any_kind: bool = False
) -> TaskGraph:
    """Merge up to `at_most` neighbouring pointwise tasks that together touch at most `nbytes`, and
    no more than the largest task. `any_kind`: other tasks as well."""

    def room(touched: Collection[int], workspace: int) -> int:
        apart = workspace if workspace > SMALL_WORKSPACE else 0  # all small ones share a place
        return sum(graph.buffers[b].nbytes for b in touched) + apart

    sizes = (room(task.touches, task.workspace) for task in graph.tasks)
    nbytes = min(nbytes, max(sizes, default=0))
    ordered = find_ordered_tasks(graph)
    groups: list[list[int]] = []
    touched, workspace = set[int](), 0
    kind: object = None
    for number, task in enumerate(graph.tasks):
        together, most = touched.union(task.touches), max(workspace, task.workspace)
        joins = (task.pointwise or any_kind) and number not in ordered
        task_kind = merge_key(task) if joins else None
        if (
            task_kind is not None
            and task_kind == kind
            and len(groups[-1]) < at_most
            and room(together, most) <= nbytes
        ):
            groups[-1].append(number)
            touched, workspace = together, most
        else:
            groups.append([number])
            touched, workspace = {*task.touches}, task.workspace
            kind = task_kind
    fewer = len(graph.tasks) - len(groups)
    chains = sum(len(group) > 1 for group in groups)
    what = "small" if any_kind else "small pointwise"
    note = f"{fewer + chains} {what} tasks form {chains} groups" if fewer else ""
    return merge_groups(graph, groups, note)
