"""Dead bytes become NaN in a captured graph, where every fill is a node of it.

    stream   [fill y][ y = f(x) ][fill x]     x: no other stream touches it; y: whoever is born

A block that one engine touches is filled behind the last of its nodes, in the order of the stream.
One that several touch is dead when all have come to their end, which no stream knows: its bytes
are filled when the next block is born there. Nodes of the host fill nothing, and nobody fills host
memory.
"""

from collections.abc import Callable
from functools import partial

from offload.engines import Run
from offload.memgraph import MemGraph
from offload.memory import Arenas
from offload.poison import NAN
from offload.taskgraph import HOST


class CapturedPoison:
    """For one MemGraph in its arenas."""

    def __init__(self, memgraph: MemGraph, arenas: Arenas) -> None:
        nodes, blocks = memgraph.nodes, memgraph.blocks
        self._fills: list[Callable[[], object]] = [
            partial(arenas.bytes(block.place).fill_, NAN) for block in blocks
        ]
        self._born: list[list[int]] = [[] for _ in nodes]
        self._touched: list[list[int]] = [[] for _ in nodes]
        self._uses = [len(set(block.nodes)) for block in blocks]
        self._left = list(self._uses)
        for number, block in enumerate(blocks):
            engines = {nodes[node].engine for node in block.nodes}
            if block.place.arena == HOST or not engines or "host" in engines:
                continue
            if not block.from_start:
                self._born[min(block.nodes)].append(number)
            if not block.to_end and len(engines) == 1:
                for node in set(block.nodes):
                    self._touched[node].append(number)

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
        """Of a step that the host enqueues, or captures: a replay does not count."""
        self._left = list(self._uses)
