"""What a job takes of the host's memory, told by its plans, before it takes anything.

    held      host arena | where its residents wait while they are parked | what a step returns
    passing   every tensor once more: page-locked memory is taken whole before the tensors move into
              it, and at the end they move out of it before it is given up

Held bytes add up over the jobs that live together. Passing bytes are those of one job if only one
begins or ends at a time. What lies on a device is not counted; a CPU's arena belongs to the stage.
"""

from dataclasses import dataclass
from math import prod

from offload.graph.memgraph import OFFLOAD, RELOAD, places_of
from offload.graph.taskgraph import HOST, TaskGraph
from offload.memory.homes import resident_bytes
from offload.memory.runnable import RunnablePlan
from offload.program.kernels import Value, device_of
from offload.torch_seams import pytree


@dataclass(frozen=True, slots=True)
class HostNeeds:
    """Bytes of the host's memory that a job needs."""

    held: int
    """As long as the job lives."""
    passing: int
    """Besides, while it begins and while it ends."""


def needs(plan: RunnablePlan, *more: RunnablePlan) -> HostNeeds:
    """The needs of a runner of these plans on a stage that others use, too."""
    plans = (plan, *more)
    arena = max(each.memgraph.arenas.get(HOST, 0) for each in plans)
    waiting = max(resident_bytes(each.memgraph) for each in plans)
    on_host = [each.graph for each in plans if device_of(each.graph).type == "cpu"]
    returned = max(map(returned_bytes, on_host), default=0)
    sizes: dict[str, int] = {}
    for each in plans:
        sizes |= moving_sizes(each)
    return HostNeeds(arena + waiting + returned, sum(sizes.values()))


def swap_seconds(plan: RunnablePlan) -> float:
    """Predicted seconds of parking the residents of a plan and of bringing them home again."""
    sizes = [place.nbytes for place in places_of(plan.memgraph).values() if place.arena != HOST]
    return sum(plan.costs.of_copy(way, nbytes) for way in (OFFLOAD, RELOAD) for nbytes in sizes)


def moving_sizes(plan: RunnablePlan) -> dict[str, int]:
    """The bytes of every tensor that moves into the arenas and, at the end, out of them again."""
    sizes: dict[str, int] = {}
    for b in plan.memgraph.starts:
        buffer = plan.graph.buffers[b]
        if buffer.persistent:
            sizes[buffer.tensor] = sizes.get(buffer.tensor, 0) + buffer.nbytes
    return sizes


def returned_bytes(graph: TaskGraph) -> int:
    """The bytes of a step's outputs."""
    if graph.program is None:
        return sum(graph.buffers[b].nbytes for b in graph.outputs)
    leaves = pytree.tree_leaves(graph.program.outputs)
    return sum(prod(v.size) * v.dtype.itemsize for v in leaves if isinstance(v, Value))
