"""Fits a later step to the tensors of a runner's first plan.

    first plan    blocks.0.weight = A   blocks.1.weight = B
    later step    blocks.0.weight = B   (blocks[0] = blocks[1])    -> blocks.1.weight

A plan finds the homes of an earlier plan by name. One tensor under two names would have two homes,
and two tensors under one name would share one. A new tensor gets a name that is free.

The first plan of a runner places all tensors that it knows, and later plans leave them there.
"""

from collections.abc import Hashable, Mapping
from dataclasses import replace

import torch

from offload.graph.taskgraph import Role, TaskGraph
from offload.program.kernels import Source


def rename_as(graph: TaskGraph, known: Mapping[str, Source]) -> TaskGraph:
    """The graph with names as in the earlier plan. `known`: the tensors of that plan by name."""
    if graph.program is None:
        return graph
    names = _names(graph.program.tensors, known)
    if all(old == new for old, new in names.items()):
        return graph
    buffers = [
        replace(buffer, tensor=names.get(buffer.tensor, buffer.tensor)) for buffer in graph.buffers
    ]
    tensors = {names[name]: source for name, source in graph.program.tensors.items()}
    program = replace(graph.program, tensors=tensors)
    return replace(graph, buffers=tuple(buffers), program=program)


def _names(tensors: Mapping[str, Source], known: Mapping[str, Source]) -> dict[str, str]:
    called = {key: name for name, source in known.items() for key in _keys(source)}
    new_names = {
        name: next((called[key] for key in _keys(source) if key in called), "")
        for name, source in tensors.items()
    }
    taken = {*known, *new_names.values()}
    for name, earlier in new_names.items():
        if not earlier:
            new, number = name, 1
            while new in taken:
                number += 1
                new = f"{name}#{number}"
            taken.add(new)
            new_names[name] = new
    return new_names


def _keys(source: Source) -> list[Hashable]:
    """Keys that are equal for the same tensor."""
    if isinstance(source, torch.Tensor):
        return [id(source)]
    return [id(tensor) for tensor in source]


def add_idle(graph: TaskGraph, other: TaskGraph) -> TaskGraph:
    """The graph with the persistent buffers of another step over the same tensors, which no task of
    the graph touches. Constants are left out: they belong to one step."""
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
