"""The plan in which nothing moves. Where the budget allows that, there is no other choice. Pure."""

from collections.abc import Iterator
from itertools import chain

from offload.errors import BudgetTooSmall
from offload.graph.memgraph import TASK
from offload.graph.taskgraph import HOST, Role
from offload.planning.packing import Owner, packed
from offload.planning.policies import Policy
from offload.planning.refusal import resident_bytes
from offload.planning.simulator import simulate
from offload.planning.wanted import FoundPlan, Wanted, peak_bytes, walked

SLACK = (1.02, 1.05, 1.1, 1.2, 1.4, 2.0)
"""Sizes of the arena to try for the plan without copies, as multiples of the peak."""


def without_copies(wanted: Wanted) -> FoundPlan | None:
    """The plan in which everything is resident, in as little of the arena as it fits into."""
    graph = wanted.graph
    if any(peak_bytes(graph, device) > wanted.capacities[device] for device in graph.devices):
        return None
    at_home = any(graph.buffers[b].persistent and p.arena == HOST for b, p in wanted.homes.items())
    if at_home or any(task.lane == "host" for task in graph.tasks):
        return None  # it does not fit without moving
    persistent = frozenset(b for b, buffer in enumerate(graph.buffers) if buffer.persistent)
    for policy, arenas in chain([_packed(wanted, persistent)], _by_time(wanted, persistent)):
        if any(nbytes > wanted.capacities[device] for device, nbytes in arenas.items()):
            continue
        try:
            memgraph = walked(wanted, arenas, policy)
        except BudgetTooSmall:
            continue
        inputs = sum(graph.buffers[b].role is Role.INPUT for b in memgraph.starts)
        if sum(node.kind != TASK for node in memgraph.nodes) <= inputs:
            simulation = simulate(memgraph, wanted.costs)
            return FoundPlan(
                memgraph, policy, simulation, ("everything resident",), nothing_moves=True
            )
    return None


def _packed(wanted: Wanted, persistent: frozenset[int]) -> tuple[Policy, dict[int, int]]:
    """Pack by size. If that fails the arenas have no bytes, so the walk is refused."""
    offsets: dict[Owner, int] = {}
    tops: dict[int, int] = {}
    for device in wanted.graph.devices:
        base = resident_bytes(wanted.graph, device, persistent, wanted.homes)
        places, tops[device] = packed(wanted.graph, device, base)
        offsets.update(places)
    return Policy(persistent, ahead=0, offsets=offsets), tops


def _by_time(wanted: Wanted, persistent: frozenset[int]) -> Iterator[tuple[Policy, dict[int, int]]]:
    alignment = wanted.graph.alignment
    for slack in SLACK:
        yield (
            Policy(persistent, ahead=4),
            {
                device: int(peak_bytes(wanted.graph, device) * slack) // alignment * alignment
                for device in wanted.graph.devices
            },
        )
