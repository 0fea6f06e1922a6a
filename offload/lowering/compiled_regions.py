"""Compiles calls in a row into one by Inductor, so that values between them are never in memory.

    pow: x -> a   mul: a -> b   add: x b -> c   tanh: c -> d        Fused: x -> d

A region has fixed shapes, numbers and device: those of its calls. The compiled code allocates its
outputs and sometimes scratch memory. profiling.py sees both, so the allocator places the outputs as
it places those of any kernel.

Compiling a region takes seconds, so equal regions are compiled once. PyTorch caches compiled code.
On a CPU the code is C++ and needs a compiler; on a GPU it is Triton.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from offload.errors import GraphError
from offload.program.kernels import Call, Value
from offload.torch_seams import pytree, schema_of, standalone_compile


@dataclass(frozen=True, slots=True)
class Region:
    """`calls` that read `inputs` and make `outputs`; buffers are numbered from 0."""

    calls: tuple[Call, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]

    @property
    def key(self) -> Any:
        """Equal for regions that compile to the same code."""
        return (
            self.inputs,
            self.outputs,
            tuple((call.op, _frozen(call.args), _frozen(call.kwargs)) for call in self.calls),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Fused:
    """A compiled region: `fused(*inputs)` returns the outputs in new memory."""

    run: Callable[..., Sequence[torch.Tensor]]
    ops: tuple[str, ...]
    """Names of the ops that it was made of, for people."""

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.run(*tensors))


def compiled(region: Region, device: torch.device) -> Fused:
    """Compile a region. Whatever Inductor raises passes through."""
    module = _module(region)
    examples: list[Any] = [_example(value, device) for value in region.inputs]
    # It needs no worker processes: there are only a few small regions.
    patches = {"compile_threads": 1, "triton.cudagraphs": False}
    with torch.no_grad():
        run = standalone_compile(
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
            raise GraphError(f"{leaf} is not the whole of {whole} in another shape")
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
    return schema_of(op).returns


def reshaped(value: Value, whole: Value) -> bool:
    """Whether the value is the whole tensor with its elements in order, perhaps in another
    shape."""
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
    """A key for lookups in which 1, 1.0 and True differ."""
    if isinstance(tree, Mapping):
        return tuple((name, _frozen(tree[name])) for name in sorted(tree))
    if isinstance(tree, tuple | list):
        return (type(tree), *map(_frozen, tree))
    return (type(tree), tree)
