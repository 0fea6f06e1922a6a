"""Names the graph passes and runs them in order. Each has a file and can be tested alone.

    dead -> counters -> sums -> split -> early -> buckets -> pointwise -> checks -> planner

These passes keep every bit of the step's results. `chunked_loss` does not: it runs only for those
who name it in `also`, and `explain()` says so. The search for a plan chooses where updates run
(`host_updates`), which of them wait for the next step's forward pass (`rotation`), and for how many
micro-batches a weight comes in at once (`micro_batches`).
"""

from collections.abc import Iterable

from offload.errors import GraphError
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
from offload.lowering.vocabulary_loss import chunked_loss

__all__ = [
    "add_in_place",
    "beside",
    "bucketed_updates",
    "checks_first",
    "chunked_loss",
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

_DEFAULT = (
    without_views_and_dead,
    fold_counters,
    add_in_place,
    split_updates,
    early_updates,
    bucketed_updates,
    grouped,
    checks_first,
)
_BY_NAME = (chunked_loss,)


def lower(graph: TaskGraph, also: Iterable[str] = ()) -> TaskGraph:
    """Run the passes asked for by name, then those that keep every bit."""
    known = {one.__name__: one for one in _BY_NAME}
    for name in also:
        if name not in known:
            raise GraphError(f"there is no pass {name!r}; passes by name are: {sorted(known)}")
        graph = known[name](graph)
    for one in _DEFAULT:
        graph = one(graph)
    return graph
