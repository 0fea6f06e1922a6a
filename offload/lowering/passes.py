"""Names the graph passes and runs them in order. Each has a file and can be tested alone.

    dead -> counters -> sums -> split -> early -> buckets -> pointwise -> checks -> planner

These passes keep every bit of the step's results. The search for a plan chooses where updates run
(`host_updates`), and for how many micro-batches a weight comes in at once (`micro_batches`).
"""

from offload.graph.taskgraph import TaskGraph
from offload.lowering.beside import beside
from offload.lowering.buckets import bucketed_updates
from offload.lowering.checks_first import checks_first
from offload.lowering.counters import fold_counters
from offload.lowering.dead_tasks import without_views_and_dead
from offload.lowering.early_updates import early_updates
from offload.lowering.host_updates import host_updates
from offload.lowering.micro_batches import layer_by_layer
from offload.lowering.pointwise_groups import grouped
from offload.lowering.sums import add_in_place
from offload.lowering.turns import in_turn
from offload.lowering.update_splits import split_updates

__all__ = [
    "add_in_place",
    "beside",
    "bucketed_updates",
    "checks_first",
    "early_updates",
    "fold_counters",
    "grouped",
    "host_updates",
    "in_turn",
    "layer_by_layer",
    "lower",
    "split_updates",
    "without_views_and_dead",
]

PASSES = (
    without_views_and_dead,
    fold_counters,
    add_in_place,
    split_updates,
    early_updates,
    bucketed_updates,
    grouped,
    checks_first,
)


def lower(graph: TaskGraph) -> TaskGraph:
    """Run all of these passes, in their order."""
    for one in PASSES:
        graph = one(graph)
    return graph
