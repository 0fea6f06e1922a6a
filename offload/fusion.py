"""Calls in a row, compiled by Inductor into one: what they hand to each other is never in memory.

    pow: x -> a   mul: a -> b   add: x b -> c   tanh: c -> d        Fused: x -> d

A region is static: its shapes, its numbers and its device are those of the calls. What the compiled
code allocates is its outputs and, at times, something of its own; profiling.py sees both, so the
outputs are placed by the allocator as any kernel's are.

Compiling a region takes seconds, so equal ones are compiled once. PyTorch keeps what was compiled
in its own cache. On a CPU the code is C++ and needs a compiler, on a GPU it is Triton.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.utils import _pytree as pytree

from offload.errors import GraphError
from offload.kernels import Call, Value


@dataclass(frozen=True, slots=True)
class Region:
    """`calls` that read `inputs` and leave `outputs`, over buffers numbered from 0."""

    calls: tuple[Call, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]

    @property
    def key(self) -> Any:
        """Equal for those that compile to the same."""
        return (
            self.inputs,
            self.outputs,
            tuple((call.op, _frozen(call.args), _frozen(call.kwargs)) for call in self.calls),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Fused:
    """`fused(*inputs)` returns the outputs in new memory."""

    run: Callable[..., Sequence[torch.Tensor]]
    ops: tuple[str, ...]
    """What it was made of, for people."""

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.run(*tensors))


def compiled(region: Region, device: torch.device) -> Fused:
    """Raises whatever Inductor raises where it cannot."""
    module = _module(region)
    examples: list[Any] = [_example(value, device) for value in region.inputs]
    # No processes of its own: there are only a few regions, and they are small.
    patches = {"compile_threads": 1, "triton.cudagraphs": False}
    with torch.no_grad():
        run = torch._inductor.standalone_compile(
            module,
            examples,
            dynamic_shapes="from_example_inputs",
            options={"config_patches": patches},
        )
    return Fused(run, tuple(str(call.op) for call in region.calls))


def _example(value: Value, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(value.size, value.stride, dtype=value.dtype, device=device)


def _module(region: Region) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    made: dict[int, tuple[Value, torch.fx.Node]] = {}
    given = {value: graph.placeholder(f"x{n}") for n, value in enumerate(region.inputs)}

    def node(leaf: Any) -> Any:
        if not isinstance(leaf, Value):
            return leaf
        if leaf in given:
            return given[leaf]
        whole, found = made[leaf.buffer]
        if leaf == whole:
            return found
        if not reshaped(leaf, whole):
            raise GraphError(f"{leaf} is no reshaped {whole}")
        return graph.call_function(torch.ops.aten.reshape.default, (found, list(leaf.size)))

    for call in region.calls:
        args, kwargs = pytree.tree_map(node, (call.args, dict(call.kwargs)), is_leaf=_is_value)
        result = graph.call_function(call.op, args, kwargs)
        for n, value in enumerate(call.outputs):
            if value is not None:
                several = len(returns(call.op)) > 1
                one = graph.call_function(operator.getitem, (result, n)) if several else result
                made[value.buffer] = (value, one)
    graph.output(tuple(made[value.buffer][1] for value in region.outputs))
    return torch.fx.GraphModule({}, graph)


def returns(op: Any) -> Sequence[Any]:
    return op._schema.returns


def reshaped(value: Value, whole: Value) -> bool:
    """Whether it is the whole tensor, perhaps by another shape, with its elements in order."""
    return value == whole or (
        value.dtype == whole.dtype
        and prod(value.size) == prod(whole.size)
        and value.offset == whole.offset == 0
        and _contiguous(value)
        and _contiguous(whole)
    )


def _contiguous(value: Value) -> bool:
    step = 1
    for n, stride in zip(reversed(value.size), reversed(value.stride), strict=True):
        if n != 1 and stride != step:
            return False
        step *= n
    return True


def _is_value(leaf: Any) -> bool:
    return isinstance(leaf, Value)


def _frozen(tree: Any) -> Any:
    """Something to look it up by: 1, 1.0 and True are three things."""
    if isinstance(tree, Mapping):
        return tuple((name, _frozen(tree[name])) for name in sorted(tree))
    if isinstance(tree, tuple | list):
        return (type(tree), *map(_frozen, tree))
    return (type(tree), tree)
