"""Dead bytes become NaN, so that a use after free cannot hide.

    block of a   [ written .. read .. last read ]0xFF 0xFF 0xFF[ block of b: written ...

Whoever is the last to touch a block fills it, before anybody is told that it is done: the next
owner of the bytes waits for that. 0xFF is a NaN in every floating type, and -1 in whole numbers.
"""

import ctypes
import threading
from collections.abc import Callable
from functools import partial

from offload.engines import Run
from offload.memgraph import MemGraph, Place
from offload.memory import Arenas
from offload.taskgraph import HOST

NAN = 0xFF


class Poison:
    """For one MemGraph in its arenas."""

    def __init__(self, memgraph: MemGraph, arenas: Arenas) -> None:
        blocks = memgraph.blocks
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
        self._first = [_fill(arenas, place) for place in _outside(kept, arenas)]

    def wrap(self, node: int, run: Run) -> Run:
        touched = self._touched[node]
        return partial(self._run, run, touched) if touched else run

    def _run(self, run: Run, touched: list[int]) -> None:
        run()
        with self._lock:
            for block in touched:
                self._left[block] -= 1
            dead = [block for block in touched if not self._left[block]]
        for block in dead:
            self._fills[block]()

    def begin(self) -> None:
        """Before the inputs of a step are there."""
        self._left = list(self._uses)
        for fill in self._first:
            fill()


class StreamPoison:
    """Where a run only enqueues: what it fills lies in its stream, before or behind the node.

        stream   [fill y][ y = f(x) ][fill x]     x: no other stream touches it; y: whoever is born

    A block that one engine touches is filled behind the last of its nodes, in the order of the
    stream. One that several touch is dead when all have come to their end, which no stream knows:
    its bytes are filled when the next block is born there. Nodes of the host fill nothing, and
    nobody fills host memory: no stream writes there but by copies.
    """

    def __init__(self, memgraph: MemGraph, arenas: Arenas) -> None:
        blocks = memgraph.blocks
        self._uses = [len(set(block.nodes)) for block in blocks]
        self._left = list(self._uses)
        self._fills = [_fill_tensor(arenas, block.place) for block in blocks]
        self._touched: list[list[int]] = [[] for _ in memgraph.nodes]
        self._born: list[list[int]] = [[] for _ in memgraph.nodes]
        for number, block in enumerate(blocks):
            if block.place.arena == HOST or not block.nodes:
                continue
            engines = {memgraph.nodes[node].engine for node in block.nodes}
            if not block.from_start:
                self._born[min(block.nodes)].append(number)
            if not block.to_end and len(engines) == 1:
                for node in set(block.nodes):
                    self._touched[node].append(number)
        kept = [block.place for block in blocks if block.from_start]
        kept += memgraph.starts.values()
        self._first = [_fill_tensor(arenas, place) for place in _outside(kept, arenas)]

    def wrap(self, node: int, run: Run) -> Run:
        born, touched = self._born[node], self._touched[node]
        return partial(self._run, run, born, touched) if born or touched else run

    def _run(self, run: Run, born: list[int], touched: list[int]) -> None:
        for block in born:
            self._fills[block]()
        run()
        for block in touched:
            self._left[block] -= 1
            if not self._left[block]:
                self._fills[block]()

    def begin(self) -> None:
        """On the caller's stream, before the inputs of a step are there."""
        self._left = list(self._uses)
        for fill in self._first:
            fill()


def _fill_tensor(arenas: Arenas, place: Place) -> Callable[[], object]:
    return partial(arenas.bytes(place).fill_, NAN)


def _fill(arenas: Arenas, place: Place) -> Callable[[], object]:
    return partial(ctypes.memset, arenas.address(place), NAN, place.nbytes)


def _outside(kept: list[Place], arenas: Arenas) -> list[Place]:
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
