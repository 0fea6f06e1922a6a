"""Calls on lists of tensors, cut: one that updates every weight would need all of them at once.

_foreach_mul_([w1 w2 w3 w4], ..)     _foreach_mul_([w1 w2]) _foreach_add_([w1 w2])     one task
_foreach_add_([w1 w2 w3 w4], ..)     _foreach_mul_([w3 w4]) _foreach_add_([w3 w4])     another

torch computes every position by itself, so a piece has the bits of the whole.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from offload.live.tape_kernel import TapeKernel
from offload.program.kernels import Call, Value

BY_POSITION = ("aten::_foreach_", "aten::_fused_adam", "aten::_fused_sgd", "aten::_fused_adagrad")
PIECES = 16
"""A list is cut to about so many pieces, and more if some of its tensors are larger than that."""


def works_on_lists(op: str, call: Call) -> bool:
    """Whether the call computes every position of its lists by itself."""
    return op.startswith(BY_POSITION) and any(map(_is_tensors, _arguments(call)))


def list_length(call: Call) -> int:
    """The length of the call's lists."""
    return len(_first_list(call))


def find_cuts(calls: Sequence[Call]) -> list[slice]:
    """Where the lists of these calls are cut, by the bytes of the largest tensors."""
    whole = list_length(calls[0])
    every = (arg for call in calls for arg in _arguments(call) if _is_tensors(arg))
    lists = [arg for arg in every if len(arg) == whole]
    sizes = [max(map(_bytes, tensors)) for tensors in zip(*lists, strict=True)]
    limit = sum(sizes) // PIECES
    slices, begin, total = [], 0, 0
    for position, size in enumerate(sizes):
        if total + size > limit and position > begin:
            slices.append(slice(begin, position))
            begin, total = position, 0
        total += size
    return [*slices, slice(begin, len(sizes))]


def cut_call(call: Call, cut: slice) -> Call:
    """The call for some positions of its lists."""
    whole = list_length(call)
    lengths = [len(arg) if isinstance(arg, list) else 0 for arg in _arguments(call)]

    def of_list(arg: Any) -> Any:
        return arg[cut] if isinstance(arg, list) and len(arg) == whole else arg

    return replace(
        call,
        op=call.op.cut(cut, whole, lengths) if isinstance(call.op, TapeKernel) else call.op,
        args=tuple(map(of_list, call.args)),
        kwargs={name: of_list(arg) for name, arg in call.kwargs.items()},
        outputs=call.outputs[cut],
    )


def are_apart(pieces: Sequence[tuple[set[int], set[int]]]) -> bool:
    """Whether none writes what another one reads or writes. `pieces`: what each reads, and
    writes."""
    return all(
        writes.isdisjoint(reads | others)
        for n, (_, writes) in enumerate(pieces)
        for m, (reads, others) in enumerate(pieces)
        if n != m
    )


def _bytes(value: Value) -> int:
    return prod(value.size) * value.dtype.itemsize


def _arguments(call: Call) -> Sequence[Any]:
    return (*call.args, *call.kwargs.values())


def _first_list(call: Call) -> list[Value]:
    return next(arg for arg in _arguments(call) if _is_tensors(arg))


def _is_tensors(arg: Any) -> bool:
    return isinstance(arg, list) and bool(arg) and all(isinstance(leaf, Value) for leaf in arg)
