"""Names the graph passes and runs them in order. Each has a file and can be tested alone.

    updates -> split -> measured -> dead -> counters -> sums -> early -> placed
    -> buckets -> pointwise

These passes keep every bit of the step's results. The search for a plan chooses where updates run
(`host_updates`), and for how many micro-batches a weight comes in at once (`micro_batches`).
"""

from offload.graph.taskgraph import TaskGraph
from offload.lowering.buckets import bucket_updates
from offload.lowering.counters import fold_counters
from offload.lowering.dead_tasks import drop_dead_tasks
from offload.lowering.early_updates import move_updates_early
from offload.lowering.pointwise_groups import group_tasks
from offload.lowering.sums import add_in_place

PASSES = (drop_dead_tasks, fold_counters, add_in_place, move_updates_early)
MERGES = (bucket_updates, group_tasks)
"""These merge tasks of one device, so they come after the tasks have their devices."""


def lower(graph: TaskGraph) -> TaskGraph:
    """Run all of these passes, in their order."""
    for run_pass in (*PASSES, *MERGES):
        graph = run_pass(graph)
    return graph
