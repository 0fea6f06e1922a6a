"""A peer's micro-batches, planned: everything begins and ends on the host.

What no plan can beat (`Least`), with weights W and their sums S, and a card of M bytes:

    compute     the first weights come in, then the work of all micro-batches, without anything
                computed twice, then a sum leaves
    in          W, and once more what of W does not fit: both passes need all of it
    in, then    W comes in before any backward pass begins: each one follows its own forward pass
    out         a sum is complete only after all forward passes, and then leaves

The two directions of the link do not disturb each other in it, so it is a little too low.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from offload import Costs, TaskGraph
from offload.graph.memgraph import Place
from offload.graph.taskgraph import HOST, Role
from offload.lowering.micro_batches import orders
from offload.planning.search import best_plan
from offload.planning.verify import verify
from offload.planning.wanted import FoundPlan, Wanted


@dataclass(frozen=True, slots=True)
class Least:
    """Seconds that no plan can beat, by what sets them."""

    parts: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return max(self.parts.values())

    @property
    def binds(self) -> str:
        return max(self.parts, key=lambda part: self.parts[part])


def least(graph: TaskGraph, costs: Costs, budget: int, carried: bool) -> Least:
    """`carried`: the sums come in, too."""
    weights = sum(b.nbytes for b in graph.buffers if b.role is Role.PARAMETER)
    last = min(b.nbytes for b in graph.buffers if b.role is Role.STATE)
    sums = sum(b.nbytes for b in graph.buffers if b.role is Role.STATE)
    first = sum(graph.buffers[b].nbytes for b in graph.tasks[0].reads)
    seconds = {"forward": 0.0, "backward": 0.0}
    for task in graph.tasks:
        seconds[task.phase] += costs.of_task(task)
    again = max(0, weights - budget) + (sums if carried else 0)
    enter, leave = weights / costs.h2d, sums / costs.d2h
    return Least(
        {
            "compute": first / costs.h2d + sum(seconds.values()) + last / costs.d2h,
            "in": enter + again / costs.h2d,
            "in, then backward": enter + seconds["backward"],
            "in, then out": enter + leave,
            "forward, then out": seconds["forward"] + leave,
        }
    )


def planned(graph: TaskGraph, costs: Costs, budget: int) -> FoundPlan:
    """The best plan within `budget` bytes, proven."""
    homes: dict[int, Place] = {}
    end = 0
    for b, buffer in enumerate(graph.buffers):
        if buffer.persistent:
            homes[b] = Place(HOST, end, buffer.nbytes)
            end += graph.aligned(buffer.nbytes)
    (_, first), *others = orders(graph)
    capacity = budget // graph.alignment * graph.alignment
    found = best_plan(Wanted(first, {0: capacity}, costs, homes, others=others))
    verify(found.memgraph)
    return found
