"""Reorders the micro-batches of a step: a weight comes in once for several. Pure.

    one by one       F1 F2 B2 B1 | f1 f2 b2 b1 U       every weight twice a micro-batch
    layer by layer   F1 f1 F2 B2 f2 b2 B1 b1 U         twice a step: w1 serves F1 and f1, ...

A piece is a run of tasks that begins where other weights are needed. The pieces of several
micro-batches take turns, and what a task depends on always goes first. So sums, statistics and
random draws keep their order, and every bit stays.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest

from offload.graph.taskgraph import Role, TaskGraph
from offload.planning.residency import SMALL

ONCE = "a weight moves once for"
"""The beginning of the note of a graph whose weights move once for several micro-batches."""


def list_orders(graph: TaskGraph) -> Iterator[tuple[str, TaskGraph]]:
    """The graph as it is, then with weights that move once for fewer and fewer micro-batches."""
    yield "", graph
    turns = 1 + max((task.turn for task in graph.tasks), default=0)
    if turns > 1:
        for together in dict.fromkeys((turns, (turns + 1) // 2)):
            if together > 1:
                name = f"weights move once for {together} micro-batches"
                yield name, take_turns(graph, together)


def take_turns(graph: TaskGraph, together: int, nbytes: int = SMALL) -> TaskGraph:
    """Let pieces of `together` micro-batches take turns. A piece begins where other weights are
    needed. Weights below `nbytes` do not count."""
    turns: dict[int, list[int]] = {}
    for number, task in enumerate(graph.tasks):
        turns.setdefault(task.turn, []).append(number)
    cut = [_pieces(graph, turns[turn], nbytes) for turn in sorted(turns)]
    wanted: list[int] = []
    for first in range(0, len(cut), together):
        for pieces in zip_longest(*cut[first : first + together], fillvalue=()):
            wanted += chain.from_iterable(pieces)
    order = _complete(graph.dependencies(), wanted)
    return graph.reorder(order, f"{ONCE} {together} micro-batches")


def _pieces(graph: TaskGraph, tasks: Sequence[int], nbytes: int) -> list[list[int]]:
    """Cut the tasks where other weights are needed. An update stays with its gradient."""
    pieces: list[list[int]] = [[]]
    now: set[int] = set()
    for number in tasks:
        task = graph.tasks[number]
        weights = {
            b
            for b in task.touches
            if graph.buffers[b].role is Role.PARAMETER and graph.buffers[b].nbytes >= nbytes
        }
        if task.phase != "update" and not weights <= now:
            pieces.append([])
            now = weights
        pieces[-1].append(number)
    return pieces


def _complete(needed: Sequence[Sequence[int]], wanted: Sequence[int]) -> list[int]:
    """All tasks in the wanted order, except that each comes after those that it needs."""
    done = [False] * len(needed)
    order: list[int] = []
    for task in wanted:
        waiting = [task]
        while waiting:
            now = waiting[-1]
            missing = [] if done[now] else [before for before in needed[now] if not done[before]]
            if missing:
                waiting += reversed(missing)
                continue
            waiting.pop()
            if not done[now]:
                done[now] = True
                order.append(now)
    return order
