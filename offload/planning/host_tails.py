"""Finds the tail of a step: nodes of the host after which nothing of a device comes. Pure.

    compute  F1 F2 B2 B1 |                        the device is free for another job at the bar
    d2h         g2> g1>  |
    host           u2    | u1 ------>             tail: u2 u1 (u2 may run before the bar)

What is in a tail stays within the job's own arena on the host, and no output comes of it. So
neither a job that takes the device's arena nor the copies of parked residents touch its bytes.
"""

from offload.graph.memgraph import TASK, MemGraph, Node
from offload.graph.taskgraph import HOST
from offload.planning.simulator import Timeline


def host_tail(memgraph: MemGraph) -> tuple[int, ...]:
    """The nodes of the tail, in the order of the plan. They hold everything that comes after any
    of them."""
    awaited: set[int] = set()
    """Nodes that a node outside of the tail waits for."""
    tail: list[int] = []
    for number in range(len(memgraph.nodes) - 1, -1, -1):
        node = memgraph.nodes[number]
        if number not in awaited and _stays_on_host(memgraph, node):
            tail.append(number)
        else:
            awaited.update(node.deps)
    return tuple(reversed(tail))


def tail_seconds(memgraph: MemGraph, timeline: Timeline) -> float:
    """Seconds of a simulated step in which only its tail is left."""
    tail = frozenset(host_tail(memgraph))
    ends = {node: end for node, _, _, end in timeline}
    device = max((end for node, end in ends.items() if node not in tail), default=0.0)
    return max(ends.values(), default=0.0) - device


def _stays_on_host(memgraph: MemGraph, node: Node) -> bool:
    if node.kind != TASK or node.lane != "host":
        return False
    graph, task = memgraph.graph, memgraph.graph.tasks[node.task]
    if task.random or not set(graph.outputs).isdisjoint(task.writes):
        return False  # the next job draws from the same generator; outputs are read before
    buffers = [access.buffer for access in node.accesses if access.buffer is not None]
    homes = [memgraph.starts[b] for b in buffers if graph.buffers[b].persistent]
    places = [access.place for access in node.accesses]
    return all(place.arena == HOST for place in (*places, *homes))
