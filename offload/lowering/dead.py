"""Tasks of which nothing remains are no tasks: views (they write nothing), and dead results.

    x -> y   y -> z   w -> z   z -> out        the second: z is made anew before anybody reads it

Backwards: a task stays if it writes a buffer that is live. The outputs and the persistent buffers
are, when the step is over. Draws of random numbers stay: the next one would be another.
"""

from offload.lowering.merging import held_in_order, regrouped
from offload.taskgraph import TaskGraph


def without_views_and_dead(graph: TaskGraph) -> TaskGraph:
    """The graph without tasks that write nothing that is read later."""
    held = held_in_order(graph)
    live = {b for b, buffer in enumerate(graph.buffers) if buffer.persistent} | {*graph.outputs}
    kept: list[int] = []
    for number in reversed(range(len(graph.tasks))):
        task = graph.tasks[number]
        if number in held or not live.isdisjoint(task.writes):
            kept.append(number)
            live.difference_update(task.writes)
            live.update(task.reads)
    gone = len(graph.tasks) - len(kept)
    note = f"{gone} tasks of which nothing remains are left out" if gone else ""
    return regrouped(graph, [[number] for number in reversed(kept)], note)
