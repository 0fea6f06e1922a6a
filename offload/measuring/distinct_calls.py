"""Finds the calls that differ in more than their buffers. Only these may differ in what they cost.

    mm(buffer 7 from byte 4096 on, buffer 9)    --at_zero-->    mm(buffer 0, buffer 1)
    mm(buffer 3, buffer 2)                      --at_zero-->    the same, if sizes are the same

The signature of a call at zero is its key: one call of each key is measured for all others.
"""

from typing import Any

import torch

from offload.program.kernels import CPU, Call, Value


def values_of(call: Call) -> list[Value]:
    """The tensors among the call's arguments."""
    found: list[Value] = []
    call.arguments(found.append)
    return found


def end_of(value: Value) -> int:
    """Bytes from the beginning of the buffer to the end of the value."""
    if 0 in value.size:
        return 0
    last = sum((n - 1) * step for n, step in zip(value.size, value.stride, strict=True))
    return (value.offset + last + 1) * value.dtype.itemsize


def at_zero(call: Call, alignment: int) -> Call:
    """The same call over buffers 0, 1, ... that begin at the first byte that it touches."""
    names: dict[int, int] = {}
    first: dict[int, int] = {}
    for value in (*values_of(call), *filter(None, call.outputs)):
        names.setdefault(value.buffer, len(names))
        begin = value.offset * value.dtype.itemsize // alignment * alignment
        first[value.buffer] = min(first.get(value.buffer, begin), begin)
    for value in filter(None, call.outputs):
        first[value.buffer] = 0  # memory that the op allocates begins where the buffer does

    def moved(value: Value) -> Value:
        offset = value.offset - first[value.buffer] // value.dtype.itemsize
        return Value(names[value.buffer], value.dtype, value.size, value.stride, offset)

    args, kwargs = call.arguments(moved)
    outputs = tuple(None if v is None else moved(v) for v in call.outputs)
    return Call(call.op, args, kwargs, outputs)


def signature(call: Call) -> tuple[Any, ...]:
    """All that a call at zero says, as a key."""
    # Objects that do the same to other tensors (updates) have a key in `alike`.
    op = getattr(call.op, "alike", call.op)
    return (op, _frozen(call.args), _frozen(dict(call.kwargs)), call.outputs)


def _frozen(tree: Any) -> Any:
    """A key for lookups in which 1, 1.0 and True differ."""
    if isinstance(tree, dict):
        return tuple((name, _frozen(tree[name])) for name in sorted(tree))
    if isinstance(tree, tuple | list):
        return (type(tree), *map(_frozen, tree))
    if isinstance(tree, torch.Tensor) and tree.dim() == 0 and tree.device == CPU:
        return (tree.dtype, repr(tree.item()))
    return (type(tree), tree)


def sizes(call: Call) -> tuple[int, ...]:
    """For each buffer, the bytes of it that the call touches: none of an output that is not
    made."""
    ends: dict[int, int] = {}
    for value in (*values_of(call), *filter(None, call.outputs)):
        ends[value.buffer] = max(ends.get(value.buffer, 0), end_of(value))
    return tuple(ends.get(b, 0) for b in range(max(ends, default=-1) + 1))
