"""Fills dead bytes with NaN in a captured graph, where every fill is a node of it.

    stream   [fill y][ y = f(x) ][fill x]     only this stream touches x; several streams touch y

If one lane touches a block, the bytes are filled after the last of its nodes, in the stream's
order. If several do, the block is dead when all of them have ended, and no stream knows when that
is. So its bytes are filled when the next block begins there. Nodes of the host fill nothing, and
host memory is never filled. Nor is what a send brings before it does: its stream is of the device
that sends, and that one does not fill other devices' bytes.
"""

from collections.abc import Callable
from functools import partial

from offload.graph.memgraph import SEND, MemGraph
from offload.graph.taskgraph import HOST
from offload.memory.arenas import Arenas
from offload.running.engines.work import Run
from offload.running.poison import NAN


class CapturedPoison:
    """Fills the dead bytes of one MemGraph's arenas."""

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
            lanes = {nodes[node].lane for node in block.nodes}
            if block.place.arena == HOST or not lanes or "host" in lanes:
                continue
            first = min(block.nodes)
            if not block.from_start and nodes[first].kind != SEND:
                self._born[first].append(number)
            if not block.to_end and len(lanes) == 1:
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
        """Prepare for a step that the host enqueues or captures; not for a replay."""
        self._left = list(self._uses)
