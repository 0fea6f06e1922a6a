"""Graphs that differ in one thing from another: a TaskGraph itself is frozen."""

from dataclasses import replace
from typing import Any

from offload.graph.builder import GraphBuilder
from offload.graph.memgraph import MemGraph
from offload.graph.taskgraph import TaskGraph


def grown(graph: TaskGraph) -> GraphBuilder:
    """A builder that goes on from this graph. Its program and notes are left out."""
    builder = GraphBuilder()
    builder.buffers += graph.buffers
    builder.tasks += graph.tasks
    builder.outputs += graph.outputs
    return builder


def with_task(graph: TaskGraph, which: int | str, **changes: Any) -> TaskGraph:
    """The graph with changes of one task, given by its number or its name."""
    names = [task.name for task in graph.tasks]
    number = which if isinstance(which, int) else names.index(which)
    assert isinstance(which, int) or names.count(which) == 1
    tasks = list(graph.tasks)
    tasks[number] = replace(tasks[number], **changes)
    return graph.with_tasks(tasks)


def with_buffer(graph: TaskGraph, number: int, **changes: Any) -> TaskGraph:
    """The graph with changes of one buffer."""
    buffers = list(graph.buffers)
    buffers[number] = replace(buffers[number], **changes)
    return graph.with_tasks(graph.tasks, buffers)


def without_edge(memgraph: MemGraph, node: int, dep: int) -> MemGraph:
    """The plan in which one node does not wait for another."""
    nodes = list(memgraph.nodes)
    nodes[node] = replace(nodes[node], deps=tuple(d for d in nodes[node].deps if d != dep))
    return replace(memgraph, nodes=tuple(nodes))


def edges_of_sends(memgraph: MemGraph) -> list[tuple[int, int]]:
    """The nodes that send or wait for a send on another lane, each with what it waits for."""
    nodes = memgraph.nodes
    return [
        (node, dep)
        for node in range(len(nodes))
        for dep in nodes[node].deps
        if "send" in (nodes[node].kind, nodes[dep].kind) and nodes[node].lane != nodes[dep].lane
    ]
