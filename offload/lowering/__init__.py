"""Graph passes: TaskGraph -> TaskGraph, each in a file of its own, each testable alone.

    captured -> dead -> counters -> sums -> split -> early -> buckets -> pointwise -> planner

A pass keeps every bit of what the step leaves behind. One that does not is done only for those who
ask for it by name (`also`: chunked_loss, fused), and `explain()` says so. Where updates run is
chosen by the plan (`host_updates`), and so is which of them wait for the next step's forward pass
(`late_updates`), and how many micro-batches a weight comes in for (`micro_batches`).
"""

from collections.abc import Iterable

from offload.errors import GraphError
from offload.lowering.buckets import bucketed_updates
from offload.lowering.counters import fold_counters
from offload.lowering.dead import without_views_and_dead
from offload.lowering.early import early_updates
from offload.lowering.fused import fused
from offload.lowering.host_updates import host_updates
from offload.lowering.loss import chunked_loss
from offload.lowering.micro_batches import in_turn, layer_by_layer
from offload.lowering.pointwise import grouped
from offload.lowering.split import split_updates
from offload.lowering.sums import add_in_place
from offload.taskgraph import TaskGraph

__all__ = [
    "add_in_place",
    "bucketed_updates",
    "chunked_loss",
    "early_updates",
    "fold_counters",
    "fused",
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
)
_BY_NAME = (chunked_loss, fused)


def lower(graph: TaskGraph, also: Iterable[str] = ()) -> TaskGraph:
    """The graph as it is planned: the passes that keep every bit, after those asked for by name."""
    known = {one.__name__: one for one in _BY_NAME}
    for name in also:
        if name not in known:
            raise GraphError(f"no pass is called {name!r}; by name there are: {sorted(known)}")
        graph = known[name](graph)
    for one in _DEFAULT:
        graph = one(graph)
    return graph
