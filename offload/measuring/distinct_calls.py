"""Finds the calls that differ in more than their buffers. Only these may differ in what they cost.

    mm(buffer 7 from byte 4096 on, buffer 9)    --move_to_zero-->    mm(buffer 0, buffer 1)
    mm(buffer 3, buffer 2)                      --move_to_zero-->    the same, if sizes are the same

A call that is moved to zero is its signature. Of all calls with equal signatures one is measured.
"""

from typing import Any

import torch

from offload.program.kernels import CPU, Call, Value, values_in


def values_of(call: Call) -> list[Value]:
    """The tensors among the call's arguments."""
    return [*values_in((*call.args, *call.kwargs.values()))]


def end_of(value: Value) -> int:
    """Bytes from the beginning of the buffer to the end of the value."""
    if 0 in value.size:
        return 0
    last = sum((n - 1) * step for n, step in zip(value.size, value.stride, strict=True))
    return (value.offset + last + 1) * value.dtype.itemsize


def move_to_zero(call: Call, alignment: int) -> Call:
    """The same call over buffers 0, 1, ... that begin at the first byte that it touches."""
    places = _places(call, alignment)

    def move(value: Value) -> Value:
        number, offset = _move(value, places)
        return Value(number, value.dtype, value.size, value.stride, offset)

    args, kwargs = call.arguments(move)
    outputs = tuple(None if v is None else move(v) for v in call.outputs)
    return Call(call.op, args, kwargs, outputs)


def signature(call: Call, alignment: int) -> tuple[Any, ...]:
    """All of the call, moved to zero, as a key."""
    places = _places(call, alignment)
    # Objects that do the same to other tensors (updates) have a key in `alike`.
    op = getattr(call.op, "alike", call.op)
    frozen = [_freeze(part, places) for part in (call.args, dict(call.kwargs), call.outputs)]
    return (op, *frozen)


Places = dict[int, tuple[int, int]]


def _places(call: Call, alignment: int) -> Places:
    """By buffer: its number among those of the call, and the first byte that the call touches."""
    places: Places = {}
    for value in values_in((*call.args, *call.kwargs.values())):
        begin = value.offset * value.dtype.itemsize // alignment * alignment
        number, first = places.get(value.buffer, (len(places), begin))
        places[value.buffer] = number, min(first, begin)
    for value in filter(None, call.outputs):
        # Memory that the op allocates begins where the buffer does.
        places[value.buffer] = places.get(value.buffer, (len(places), 0))[0], 0
    return places


def _move(value: Value, places: Places) -> tuple[int, int]:
    number, first = places[value.buffer]
    return number, value.offset - first // value.dtype.itemsize


def _freeze(tree: Any, places: Places) -> Any:
    """A key for lookups in which 1, 1.0 and True differ."""
    if type(tree) is Value:
        return (*_move(tree, places), tree.dtype, tree.size, tree.stride)
    if isinstance(tree, dict):
        return tuple((name, _freeze(tree[name], places)) for name in sorted(tree))
    if isinstance(tree, tuple | list):
        return (type(tree), *[_freeze(part, places) for part in tree])
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
