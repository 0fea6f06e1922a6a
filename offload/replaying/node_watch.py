"""Compares every task of a planned run with the same task on memory of its own.

before a task   what it reads is what the reference's task read     or a move has spoilt it
after it        what it writes is what the reference's task wrote   or its kernel ran wrong
"""

import threading
from collections.abc import Mapping, Sequence

import torch

from offload.graph.memgraph import TASK, MemGraph
from offload.graph.taskgraph import TaskGraph
from offload.memory.arenas import Arenas
from offload.program.kernels import Value
from offload.replaying.plain_memory import PlainMemory, read_values, written_values
from offload.running.engines.work import Run


class NodeWatch:
    """The tensors of every task as they should be, and the first ones that were not."""

    def __init__(
        self, graph: TaskGraph, tensors: Mapping[str, torch.Tensor], batch: Sequence[torch.Tensor]
    ) -> None:
        self._reads: list[list[tuple[Value, torch.Tensor]]] = []
        self._writes: list[list[tuple[Value, torch.Tensor]]] = []
        self._lock = threading.Lock()
        self.found: tuple[int, Value, str] | None = None
        """The task, the tensor, and what is wrong with it."""
        memory = PlainMemory(graph, tensors, batch)
        for task in graph.tasks:
            self._reads.append([(v, memory.view(v).clone()) for v in read_values(task)])
            memory.run(task)
            self._writes.append([(v, memory.view(v).clone()) for v in written_values(task)])

    def wrap(self, memgraph: MemGraph, arenas: Arenas, node: int, run: Run) -> Run:
        """The run of a node with a look before and after it."""
        each = memgraph.nodes[node]
        if each.kind != TASK:
            return run
        touched = memgraph.graph.tasks[each.task].touches
        places = {b: a.place for b, a in zip(touched, each.accesses, strict=False)}

        def look(expected: Sequence[tuple[Value, torch.Tensor]], what: str) -> None:
            for value, right in expected:
                now = arenas.view(places[value.buffer], value).to(right.device)
                if self.found is None and (where := difference(right, now)):
                    with self._lock:
                        self.found = self.found or (each.task, value, f"{what}: {where}")

        def run_watched() -> None:
            look(self._reads[each.task], "differs before the task reads it")
            run()
            look(self._writes[each.task], "differs after the task wrote it")

        return run_watched


def difference(right: torch.Tensor, now: torch.Tensor) -> str:
    """Where two tensors first differ in a bit; empty if they do not."""
    if right.numel() == 0:
        return ""
    apart = _bits(right) != _bits(now)
    if not bool(apart.any()):
        return ""
    first = int(apart.flatten().nonzero()[0])
    count = int(apart.sum())
    expected, actual = right.flatten()[first].item(), now.flatten()[first].item()
    where = f"{count} of {right.numel()} elements, first element {first}"
    return f"{where}: {actual!r}, not {expected!r}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """One row of bytes for every element."""
    bits = tensor.contiguous().flatten().view(torch.uint8).view(tensor.numel(), -1)
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return bits.view(kinds[bits.size(1)]).flatten() if bits.size(1) in kinds else bits.sum(1)
