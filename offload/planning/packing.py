"""Lays out a step in which nothing moves: all stays are known, so all offsets are found at once.
Pure.

    address ^   |  large one       |          The largest is placed first, each as low as it fits
            |   |---+-----+----+---|          between those that are there at the same time.
            |   | a |  b  | c  |
            +----------------------> task

Placing by size needs a few percent more than the peak of live bytes. A plan with copies has to
place by time, and that leaves holes.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from offload.graph.memgraph import SMALL_WORKSPACE
from offload.graph.taskgraph import TaskGraph

MOST = 30_000
"""The most stays that are packed: the time grows with the square of their number."""
Owner = int | tuple[int]
"""A buffer, or in a tuple the task of a workspace."""


def packed(graph: TaskGraph, device: int, base: int) -> tuple[Mapping[Owner, int], int]:
    """Offsets, from `base` on, of everything that is not there for the whole step, and the highest
    end."""
    owners, stays = _stays(graph, device)
    if len(owners) > MOST:
        return {}, 0
    offsets = np.zeros(len(owners), np.int64)
    placed = np.zeros(len(owners), bool)
    begin, end, size = stays.T if len(owners) else np.zeros((3, 0), np.int64)
    for number in np.lexsort((begin, -size)):
        there = np.flatnonzero(placed & (begin <= end[number]) & (end >= begin[number]))
        there = there[np.argsort(offsets[there], kind="stable")]
        offsets[number] = _lowest(offsets[there], size[there], int(size[number]))
        placed[number] = True
    top = int((offsets + size).max(initial=0))
    return {owner: base + int(at) for owner, at in zip(owners, offsets, strict=True)}, base + top


def _stays(graph: TaskGraph, device: int) -> tuple[list[Owner], NDArray[np.int64]]:
    first, last = graph.spans()
    owners: list[Owner] = []
    stays: list[tuple[int, int, int]] = []
    for b in sorted(first):
        buffer = graph.buffers[b]
        if buffer.device == device and not buffer.persistent:
            owners.append(b)
            stays.append((first[b], last[b], graph.aligned(buffer.nbytes)))
    for number, task in enumerate(graph.tasks):
        if task.device == device and task.workspace > SMALL_WORKSPACE:
            owners.append((number,))
            stays.append((number, number, graph.aligned(task.workspace)))
    return owners, np.array(stays, dtype=np.int64)


def _lowest(offsets: NDArray[np.int64], sizes: NDArray[np.int64], size: int) -> int:
    """The lowest free address between these offsets, which are sorted."""
    if not len(offsets):
        return 0
    tops = np.maximum.accumulate(offsets + sizes)
    gaps = offsets - np.concatenate(([0], tops[:-1]))
    fits = np.flatnonzero(gaps >= size)
    if not len(fits):
        return int(tops[-1])
    return int(tops[fits[0] - 1]) if fits[0] else 0
