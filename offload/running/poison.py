"""Fills dead bytes with NaN, so that a use after free shows.

    block of a   [ written .. read .. last read ]0xFF 0xFF 0xFF[ block of b: written ...

The last node that touches a block fills it before it reports that it is done, and the next owner of
the bytes waits for that report. 0xFF is a NaN in every floating dtype, and -1 in integers.

    compute  [ F1 reads a ....... ]mark         on a device a node is only enqueued when its run
    d2h      [ O a ]mark  (waits for both marks)[ fill ]     returns, so the fill waits for marks

On a device the host's arena is not filled: the host could not order its fills with the copies.
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from offload.graph.memgraph import MemGraph, Place
from offload.graph.taskgraph import HOST
from offload.memory.arenas import Arenas
from offload.running.engines.work import Run

NAN = 0xFF


class Poison:
    """Fills the dead bytes of one MemGraph's arenas."""

    def __init__(self, memgraph: MemGraph, arenas: Arenas) -> None:
        blocks = memgraph.blocks
        self._is_cuda = arenas.device.type == "cuda"
        self._marks: list[list[Any]] = [[] for _ in blocks]
        self._uses = [len(set(block.nodes)) for block in blocks]
        self._left = list(self._uses)
        self._lock = threading.Lock()
        self._fills = [_fill(arenas, block.place) for block in blocks]
        self._touched: list[list[int]] = [[] for _ in memgraph.nodes]
        for number, block in enumerate(blocks):
            for node in set(block.nodes) if not block.to_end else ():
                self._touched[node].append(number)
        kept = [block.place for block in blocks if block.from_start]
        kept += memgraph.starts.values()
        on_device = [Place(n, 0, size) for n, size in arenas.sizes.items() if n != HOST and size]
        self._all = [_fill(arenas, place) for place in on_device]
        self._first = [_fill(arenas, place) for place in _find_gaps(kept, arenas)]

    def wrap(self, node: int, run: Run) -> Run:
        touched = self._touched[node]
        return partial(self._run, run, touched) if touched else run

    def _run(self, run: Run, touched: list[int]) -> None:
        run()
        mark = self._mark()
        with self._lock:
            for block in touched:
                self._left[block] -= 1
                self._marks[block].append(mark)
            dead = [block for block in touched if not self._left[block]]
        for block in dead:
            self._wait(self._marks[block])
            self._fills[block]()

    def _mark(self) -> Any:
        """An event after everything that is enqueued on the current stream now."""
        return torch.cuda.current_stream().record_event() if self._is_cuda else None

    def _wait(self, marks: Sequence[Any]) -> None:
        for mark in marks if self._is_cuda else ():
            torch.cuda.current_stream().wait_event(mark)

    def begin(self) -> None:
        """Prepare for a step, before its inputs arrive."""
        self._left = list(self._uses)
        self._marks = [[] for _ in self._uses]
        for fill in self._first:
            fill()


def _fill(arenas: Arenas, place: Place) -> Callable[[], object]:
    if arenas.device.type == "cuda":
        return tuple if place.arena == HOST else partial(arenas.bytes(place).fill_, NAN)
    return partial(ctypes.memset, arenas.address(place), NAN, place.nbytes)


def _find_gaps(kept: list[Place], arenas: Arenas) -> list[Place]:
    gaps: list[Place] = []
    for arena, size in arenas.sizes.items():
        at = 0
        for place in sorted((p for p in kept if p.arena == arena), key=lambda p: p.offset):
            if place.offset > at:
                gaps.append(Place(arena, at, place.offset - at))
            at = max(at, place.offset + place.nbytes)
        if size > at:
            gaps.append(Place(arena, at, size - at))
    return gaps
