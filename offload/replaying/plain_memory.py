"""Runs a graph's tasks one after the other on memory of their own, as eager would.

buffer 3 | ........ |     buffer 7 | .... |     every buffer has its own bytes: nothing is planned
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from offload.graph.taskgraph import Task, TaskGraph
from offload.program.kernels import Call, Value, values_in


class PlainMemory:
    """The bytes of all buffers of a graph."""

    def __init__(
        self, graph: TaskGraph, tensors: Mapping[str, torch.Tensor], batch: Sequence[torch.Tensor]
    ) -> None:
        """`tensors`, `batch`: the bytes that the step begins with."""
        assert graph.program is not None
        self._graph = graph
        self._device = graph.program.device
        self._bytes: dict[int, torch.Tensor] = {}
        for number, buffer in enumerate(graph.buffers):
            if buffer.persistent:
                given = tensors[buffer.tensor][buffer.start : buffer.start + buffer.nbytes]
                self._bytes[number] = given.to(self._device, copy=True)
        for value, given in zip(graph.program.inputs, batch, strict=True):
            self.bytes(value.buffer)[: given.nbytes].copy_(given)

    def run(self, task: Task) -> None:
        with torch.no_grad():
            for call in task.kernel.calls:
                self._call(call)

    def _call(self, call: Call) -> None:
        args, kwargs = call.arguments(self.view)
        bind = getattr(call.op, "bind", None)
        made: Any = bind(args, kwargs)() if bind else call.op(*args, **kwargs)
        results = made if isinstance(made, tuple | list) else (made,)
        for value, result in zip(call.outputs, results, strict=False):
            if value is not None:
                self.view(value).copy_(result)

    def view(self, value: Value) -> torch.Tensor:
        memory = self.bytes(value.buffer)
        empty = torch.empty(0, dtype=value.dtype, device=self._device)
        return empty.set_(memory.untyped_storage(), value.offset, value.size, value.stride)

    def bytes(self, buffer: int) -> torch.Tensor:
        if buffer not in self._bytes:
            nbytes = self._graph.buffers[buffer].nbytes
            self._bytes[buffer] = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        return self._bytes[buffer]


def read_values(task: Task) -> list[Value]:
    """The tensors that a task is given and reads."""
    given = values_in([(call.args, *call.kwargs.values()) for call in task.kernel.calls])
    return [value for value in dict.fromkeys(given) if value.buffer in task.reads]


def written_values(task: Task) -> list[Value]:
    """The tensors that a task is given or makes, over buffers that it writes."""
    touched = values_in([(c.args, *c.kwargs.values(), c.outputs) for c in task.kernel.calls])
    return [value for value in dict.fromkeys(touched) if value.buffer in task.writes]
