"""Runs a captured graph task by task, as its definition says: the oracle of the capture tests."""

from typing import Any

import torch
from torch.utils import _pytree as pytree

from offload.graph.taskgraph import TaskGraph
from offload.program.kernels import Value

POISON = 0xFF  # a float of such bytes is NaN
SMALL = 1 << 18


class Reference:
    """`outputs = Reference(graph)(*batch)`: one step on buffers of its own, then written back."""

    def __init__(self, graph: TaskGraph) -> None:
        self.graph = graph

    def __call__(self, *batch: torch.Tensor) -> tuple[Any, ...]:
        graph, program = self.graph, self.graph.program
        device = program.device
        memory = [
            torch.full((b.nbytes,), POISON, dtype=torch.uint8, device=device) for b in graph.buffers
        ]

        def view(value: Value) -> torch.Tensor:
            raw = memory[value.buffer].untyped_storage()
            return torch.empty(0, dtype=value.dtype, device=device).set_(
                raw, value.offset, value.size, value.stride
            )

        for value, tensor in zip(program.inputs, batch, strict=True):
            view(value).copy_(tensor)
        for number, buffer in enumerate(graph.buffers):
            if buffer.persistent:
                memory[number].copy_(_bytes(_live(program.tensors[buffer.tensor])))
        for task in graph.tasks:
            before = {
                b: memory[b].clone()
                for b in task.reads
                if b not in task.writes and graph.buffers[b].nbytes <= SMALL
            }
            for b in {*task.writes} - {*task.reads}:
                memory[b].fill_(POISON)  # what was there is dead
            for call in task.kernel.calls:
                args, kwargs = call.arguments(view)
                made = pytree.tree_leaves(call.op(*args, **kwargs))
                for value, tensor in zip(call.outputs, made, strict=False):
                    if value is not None:
                        # Of a GPU's kernels the fakes do not know every stride: it is copied then.
                        assert device.type == "cuda" or _layout(value.size, value.stride) == (
                            _layout(tensor.size(), tensor.stride())
                        ), f"{task.name}: {value} against {tensor.size()} {tensor.stride()}"
                        view(value).copy_(tensor)
            for b, contents in before.items():
                assert torch.equal(memory[b], contents), f"{task.name} wrote {graph.buffers[b]}"
        outputs = pytree.tree_map_only(
            Value, lambda v: view(v).clone(), program.outputs, is_leaf=_is_value
        )
        for number, buffer in enumerate(graph.buffers):
            if buffer.persistent:
                _bytes(_live(program.tensors[buffer.tensor])).copy_(memory[number])
        return outputs


def _live(source: Any) -> torch.Tensor:
    """The user's tensor, or one of several over the same storage."""
    if isinstance(source, torch.Tensor):
        return source
    return source[0]


def _layout(size: Any, stride: Any) -> list[tuple[int, int | None]]:
    """The stride of a dimension of one element means nothing."""
    return [(n, s if n > 1 else None) for n, s in zip(size, stride, strict=True)]


def _is_value(leaf: Any) -> bool:
    return isinstance(leaf, Value)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
