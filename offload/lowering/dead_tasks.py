"""Removes tasks that leave nothing behind: views, and tasks whose results nobody reads.

    x -> y   y -> z   w -> z   z -> out        the second goes: the third makes z anew before a read

The pass goes backwards and keeps a task if it writes a live buffer. Outputs and persistent buffers
are live at the end of the step. Draws of random numbers stay, because later draws depend on them.
So do operations that raise an error if a number is out of range.
"""

from offload.graph.taskgraph import Task, TaskGraph
from offload.lowering.merging import find_ordered_tasks, merge_groups
from offload.torch_seams import OpOverload, name_of

RAISING = ("embedding", "gather", "index", "nll_loss", "scatter", "take")
"""The names of operations that raise begin with one of these."""


def drop_dead_tasks(graph: TaskGraph) -> TaskGraph:
    """Remove the tasks that write nothing that is read later."""
    ordered = find_ordered_tasks(graph)
    live = {b for b, buffer in enumerate(graph.buffers) if buffer.persistent} | {*graph.outputs}
    kept: list[int] = []
    for number in reversed(range(len(graph.tasks))):
        task = graph.tasks[number]
        if number in ordered or not live.isdisjoint(task.writes) or _may_raise(task):
            kept.append(number)
            live.difference_update(task.writes)
            live.update(task.reads)
    dropped = len(graph.tasks) - len(kept)
    note = f"{dropped} tasks whose results nobody reads are left out" if dropped else ""
    return merge_groups(graph, [[number] for number in reversed(kept)], note)


def _may_raise(task: Task) -> bool:
    ops = [call.of_torch for call in getattr(task.kernel, "calls", ())]
    return any(isinstance(op, OpOverload) and name_of(op).startswith(RAISING) for op in ops)
