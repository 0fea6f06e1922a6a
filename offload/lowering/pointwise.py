"""Small pointwise tasks that stand side by side are one task: its overhead is paid once.

    to_copy  mul  add | mm | gelu  mul        ->        to_copy+2 | mm | gelu+1

A group stays small, in tasks and in bytes, so that it asks for no room that a large task does not
ask for anyway. What its members hand to each other stays planned.
"""

from offload.lowering.merging import held_in_order, kin, regrouped
from offload.taskgraph import TaskGraph


def grouped(graph: TaskGraph, at_most: int = 16, nbytes: int = 256 << 10) -> TaskGraph:
    """The graph with up to `at_most` pointwise tasks, neighbours that touch up to `nbytes`
    together, as one."""
    held = held_in_order(graph)
    groups: list[list[int]] = []
    touched: set[int] = set()
    kind: object = None
    for number, task in enumerate(graph.tasks):
        together = touched.union(task.touches)
        own = kin(task) if task.pointwise and number not in held else None
        if (
            own is not None
            and own == kind
            and len(groups[-1]) < at_most
            and sum(graph.buffers[b].nbytes for b in together) <= nbytes
        ):
            groups[-1].append(number)
            touched = together
        else:
            groups.append([number])
            touched = {*task.touches}
            kind = own
    fewer = len(graph.tasks) - len(groups)
    chains = sum(len(group) > 1 for group in groups)
    note = f"{fewer + chains} small pointwise tasks are {chains} groups" if fewer else ""
    return regrouped(graph, groups, note)
