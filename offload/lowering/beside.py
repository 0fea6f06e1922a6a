"""Adds the tensors of other steps to a graph, so that its plan places them too. Pure.

    micro-batches   weights, sums                        one runner: every tensor has one home
    update          weights, totals, optimizer's state

The first plan of a runner places all tensors that it knows, and later plans leave them there. A
tensor that only a later plan knows would move out of the arenas, and back, whenever the steps
alternate. So the graph that is planned first is given the tensors of the others. No task of it
touches them: they lie on the host, unless everything fits on the device. And what stays on the
device leaves enough of it for the largest task of each.
"""

from dataclasses import replace

from offload.errors import GraphError
from offload.graph.taskgraph import Role, TaskGraph
from offload.planning.refusal import smallest_budget
from offload.program.renaming import renamed_as
from offload.sizes import say_size


def beside(graph: TaskGraph, *others: TaskGraph) -> TaskGraph:
    """The graph, whose plan also places the tensors that only the other graphs use.

    Plan it first, and add the others to the runner of that plan."""
    begin, left = len(graph.buffers), graph.left
    for other in others:
        if graph.program is None or other.program is None:
            raise GraphError("a graph made by hand has no tensors that other steps could use")
        other = renamed_as(other, graph.program.tensors)
        used = {b for task in other.tasks for b in task.touches}.union(other.kept)
        graph = with_idle(graph, other, used)
        left = max((left, *(smallest_budget(other, device)[0] for device in other.devices)))
    graph = replace(graph, left=left)
    kept = range(begin, len(graph.buffers))
    if not kept:
        return graph
    nbytes = sum(graph.buffers[b].nbytes for b in kept)
    note = f"{say_size(nbytes)} of tensors are placed for other steps of the same runner"
    return replace(graph, kept=(*graph.kept, *kept), notes=(*graph.notes, note))


def with_idle(graph: TaskGraph, other: TaskGraph, used: set[int] | None = None) -> TaskGraph:
    """The graph with the persistent buffers of another step over the same tensors added, so that
    nothing else is put where they lie. `used`: only these of its buffers. Constants are left out:
    they belong to one step."""
    if graph.program is None or other.program is None:
        return graph
    known = {buffer.tensor for buffer in graph.buffers if buffer.persistent}
    idle = [
        buffer
        for b, buffer in enumerate(other.buffers)
        if buffer.persistent
        and (used is None or b in used)
        and buffer.role is not Role.CONSTANT
        and buffer.tensor not in known
        and buffer.tensor in other.program.tensors
    ]
    tensors = {buffer.tensor: other.program.tensors[buffer.tensor] for buffer in idle}
    program = replace(graph.program, tensors={**graph.program.tensors, **tensors})
    return replace(graph, buffers=(*graph.buffers, *idle), program=program)
