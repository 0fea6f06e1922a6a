"""The plan in which nothing moves. Where the budget allows that, there is no other choice. Pure.

address ^   |  large one       |          All stays are known. The largest is placed first, each
        |   |---+-----+----+---|          as low as it fits between those that are there at the
        |   | a |  b  | c  |              same time. That needs a few percent more than the
        +----------------------> task     peak of live bytes.
"""

from collections.abc import Iterator, Mapping
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from offload.errors import BudgetTooSmall
from offload.graph.memgraph import OFFLOAD, RELOAD, SMALL_WORKSPACE
from offload.graph.taskgraph import HOST, Role, TaskGraph
from offload.planning.policies import Owner, Policy
from offload.planning.refusal import resident_bytes
from offload.planning.simulator import simulate
from offload.planning.wanted import FoundPlan, Wanted, peak_bytes, walk_graph

SLACK = (1.02, 1.05, 1.1, 1.2, 1.4, 2.0)
"""Sizes of the arena to try for the plan without copies, as multiples of the peak."""
MOST = 30_000
"""The most stays that are packed: the time grows with the square of their number."""


def plan_without_copies(wanted: Wanted) -> FoundPlan | None:
    """The plan in which everything is resident, in as little of the arena as it fits into."""
    graph = wanted.graph
    if any(peak_bytes(graph, device) > wanted.capacities[device] for device in graph.devices):
        return None
    at_home = any(graph.buffers[b].persistent and p.arena == HOST for b, p in wanted.homes.items())
    if at_home or any(task.lane == "host" for task in graph.tasks):
        return None  # it does not fit without moving
    persistent = frozenset(b for b, buffer in enumerate(graph.buffers) if buffer.persistent)
    by_size = [_pack_by_size(wanted, persistent)] if len(graph.devices) == 1 else []
    for policy, arenas in chain(by_size, _pack_by_time(wanted, persistent)):
        if any(nbytes > wanted.capacities[device] for device, nbytes in arenas.items()):
            continue
        try:
            memgraph = walk_graph(wanted, arenas, policy)
        except BudgetTooSmall:
            continue
        inputs = sum(graph.buffers[b].role is Role.INPUT for b in memgraph.starts)
        moved = sum(node.kind in (OFFLOAD, RELOAD) for node in memgraph.nodes)
        if moved <= inputs * len(graph.devices):
            simulation = simulate(memgraph, wanted.costs)
            return FoundPlan(
                memgraph, policy, simulation, ("everything resident",), nothing_moves=True
            )
    return None


def _pack_by_size(wanted: Wanted, persistent: frozenset[int]) -> tuple[Policy, dict[int, int]]:
    """Pack by size. If that fails the arenas have no bytes, so the walk is refused."""
    offsets: dict[Owner, int] = {}
    tops: dict[int, int] = {}
    for device in wanted.graph.devices:
        base = resident_bytes(wanted.graph, device, persistent, wanted.homes)
        places, tops[device] = pack(wanted.graph, device, base)
        offsets.update(places)
    return Policy(persistent, ahead=0, offsets=offsets), tops


def _pack_by_time(
    wanted: Wanted, persistent: frozenset[int]
) -> Iterator[tuple[Policy, dict[int, int]]]:
    alignment = wanted.graph.alignment
    for slack in SLACK:
        yield (
            Policy(persistent, ahead=4),
            {
                device: int(peak_bytes(wanted.graph, device) * slack) // alignment * alignment
                for device in wanted.graph.devices
            },
        )


def pack(graph: TaskGraph, device: int, base: int) -> tuple[Mapping[Owner, int], int]:
    """Offsets, from `base` on, of everything that is not there for the whole step, and the highest
    end."""
    owners, stays = _list_stays(graph, device)
    if len(owners) > MOST:
        return {}, 0
    offsets = np.zeros(len(owners), np.int64)
    placed = np.zeros(len(owners), bool)
    begin, end, size = stays.T if len(owners) else np.zeros((3, 0), np.int64)
    for number in np.lexsort((begin, -size)):
        there = np.flatnonzero(placed & (begin <= end[number]) & (end >= begin[number]))
        there = there[np.argsort(offsets[there], kind="stable")]
        offsets[number] = _lowest_free(offsets[there], size[there], int(size[number]))
        placed[number] = True
    top = int((offsets + size).max(initial=0))
    return {owner: base + int(at) for owner, at in zip(owners, offsets, strict=True)}, base + top


def _list_stays(graph: TaskGraph, device: int) -> tuple[list[Owner], NDArray[np.int64]]:
    first, last = graph.spans(device)
    owners: list[Owner] = []
    stays: list[tuple[int, int, int]] = []
    for b in sorted(first):
        buffer = graph.buffers[b]
        if not buffer.persistent:
            owners.append(b)
            stays.append((first[b], last[b], graph.align(buffer.nbytes)))
    for number, task in enumerate(graph.tasks):
        if task.device == device and task.workspace > SMALL_WORKSPACE:
            owners.append((number,))
            stays.append((number, number, graph.align(task.workspace)))
    return owners, np.array(stays, dtype=np.int64)


def _lowest_free(offsets: NDArray[np.int64], sizes: NDArray[np.int64], size: int) -> int:
    """The lowest free address between these offsets, which are sorted."""
    if not len(offsets):
        return 0
    tops = np.maximum.accumulate(offsets + sizes)
    gaps = offsets - np.concatenate(([0], tops[:-1]))
    fits = np.flatnonzero(gaps >= size)
    if not len(fits):
        return int(tops[-1])
    return int(tops[fits[0] - 1]) if fits[0] else 0
