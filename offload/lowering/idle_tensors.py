"""Adds the tensors of another step to a graph, so that its plan leaves them where they lie. Pure.

The first plan of a runner places all tensors that it knows, and later plans leave them there. No
task of the graph touches what is added.
"""

from dataclasses import replace

from offload.graph.taskgraph import Role, TaskGraph


def with_idle(graph: TaskGraph, other: TaskGraph) -> TaskGraph:
    """The graph with the persistent buffers of another step over the same tensors. Constants are
    left out: they belong to one step."""
    if graph.program is None or other.program is None:
        return graph
    known = {buffer.tensor for buffer in graph.buffers if buffer.persistent}
    idle = [
        buffer
        for buffer in other.buffers
        if buffer.persistent
        and buffer.role is not Role.CONSTANT
        and buffer.tensor not in known
        and buffer.tensor in other.program.tensors
    ]
    tensors = {buffer.tensor: other.program.tensors[buffer.tensor] for buffer in idle}
    program = replace(graph.program, tensors={**graph.program.tensors, **tensors})
    return replace(graph, buffers=(*graph.buffers, *idle), program=program)
