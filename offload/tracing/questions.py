"""What a step asks of tensors' values while it is traced, and what it is answered.

    if mask.all(): ...    count.item()    the answer is computed now, and the graph assumes it
    x[mask]   nonzero     masked_select   asks for the number of places: then the sizes are fixed

A number that is the same in every step is so in the graph. If it is another one in a later step, a
check of the graph finds it (program/assumptions.py), and the step is captured for that one, too. A
float that the batch, the weights or a random number decides changes in every step, so it is not
answered: the fake refuses the question.
"""

from collections.abc import Callable, Iterable, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch

from offload.errors import CaptureError
from offload.program.assumptions import Assumption, Number
from offload.program.frames import say_frame, user_frame
from offload.program.kernels import Value
from offload.torch_seams import index_put_impl_, item, to_copy, version_of
from offload.tracing.tape import Tape
from offload.tracing.tape_values import is_constant, value_now

aten = torch.ops.aten
ITEM, EQUAL, NONZERO = item, aten.equal.default, aten.nonzero.default
INDEX, SELECT = aten.index.Tensor, aten.masked_select.default
PUTS = MappingProxyType(
    {
        aten.index_put.default: aten.index_put.default,
        aten.index_put_.default: aten.index_put_.default,
        index_put_impl_: aten.index_put_.default,
    }
)
"""Ops that write at the places of a mask, and those that write at indices."""
SCATTERS = MappingProxyType(
    {
        aten.masked_scatter.default: aten.index_put.default,
        aten.masked_scatter_.default: aten.index_put_.default,
    }
)
ASKING = frozenset({ITEM, EQUAL, NONZERO, INDEX, SELECT, *PUTS, *SCATTERS})
MOST = 256
"""A step may ask for so many values."""
MASKS = (torch.bool, torch.uint8)

Dispatch = Callable[..., Any]


class AssumedValues:
    """The answers of a step, in the order in which it asks. The first trace computes them; later
    ones get the same."""

    def __init__(self, known: Iterable[Number] = ()) -> None:
        self._known = [*known]
        self._asked = 0

    def begin(self) -> None:
        """Begin a trace."""
        self._asked = 0

    def next(self, compute: Callable[[], Number]) -> Number:
        if self._asked == len(self._known):
            self._known.append(compute())
        self._asked += 1
        return self._known[self._asked - 1]


class Traced(Protocol):
    """What a recorder offers to whoever answers the questions of its trace."""

    tape: Tape
    inputs: list[Value]
    device: torch.device

    def value(self, tensor: torch.Tensor) -> Value: ...


class Questions:
    """Answers the questions of one trace."""

    def __init__(
        self,
        traced: Traced,
        record: Dispatch,
        assumed: AssumedValues,
        batch: Sequence[torch.Tensor],
    ) -> None:
        """`record(op, args, kwargs)` puts an op onto the tape, and returns its fake result."""
        self._traced = traced
        self._record = record
        self._assumed = assumed
        self._batch = batch
        self._places: dict[tuple[Value, int], torch.Tensor] = {}
        """The places of each mask that was asked for, as indices."""
        assumed.begin()

    def answer(self, func: Any, args: Sequence[Any], kwargs: Any) -> tuple[Any, ...]:
        """The result of the op in a tuple; an empty one leaves the op as it is."""
        if func is ITEM:
            return self._item(args[0])
        if func is EQUAL:
            return self._equal(*args)
        if func is NONZERO:
            return (self._nonzero(args[0]),)
        if func is INDEX:
            return self._index(*args)
        if func is SELECT:
            tensor, mask = torch.broadcast_tensors(*args)
            return (self._record(INDEX, (tensor, [*self._columns(mask)]), {}),)
        if func in PUTS:
            return self._put(PUTS[func], *args, **kwargs)
        return self._scatter(SCATTERS[func], *args)

    # ---- numbers --------------------------------------------------------------------------------

    def _item(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        if tensor.dtype.is_complex or tensor.device != self._traced.device:
            return ()
        if tensor.is_floating_point():
            value = self._traced.value(tensor)
            if not is_constant(self._traced.tape, value):
                return ()
            return (self._ask(self._copied(tensor, torch.float64), float, "its value"),)
        kind = bool if tensor.dtype is torch.bool else int
        return (self._ask(self._copied(tensor, torch.int64), kind, "its value"),)

    def _equal(self, one: torch.Tensor, other: torch.Tensor) -> tuple[Any, ...]:
        if one.size() != other.size():
            return (False,)
        if one.dtype != other.dtype or one.device != other.device:
            return ()
        alike = self._record(aten.eq.Tensor, (one, other), {})
        whole = self._record(aten.all.default, (alike,), {})
        return (self._ask(self._copied(whole, torch.int64), bool, "torch.equal"),)

    def _copied(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A copy that nothing writes before it is checked."""
        if tensor.dtype is dtype:
            return self._record(aten.clone.default, (tensor,), {})
        return self._record(to_copy, (tensor,), {"dtype": dtype})

    def _ask(self, tensor: torch.Tensor, kind: type[Number], what: str) -> Number:
        tape, value = self._traced.tape, self._traced.value(tensor)
        where = say_frame(user_frame())
        if len(tape.assumptions) == MOST:
            raise CaptureError(
                f"{where}: the step asks for the values of more than {MOST} tensors. Keep them"
                " tensors, or read them before the step"
            )
        inputs = {
            own.buffer: (own, given)
            for own, given in zip(self._traced.inputs, self._batch, strict=True)
        }
        device = self._traced.device
        if tape.steps:
            raise CaptureError(
                f"{say_frame(user_frame())}: the step asks for the value of a tensor after one of"
                " its optimizers has stepped, and a value that is not the assumed one must end a"
                " step before anything has changed. Ask for it before the first step()"
            )
        answer = self._assumed.next(lambda: kind(value_now(tape, inputs, value, device)))
        own = is_constant(tape, value)
        tape.assumptions.append((len(tape.ops), value, Assumption(answer, what, where, own)))
        return answer

    # ---- masks ----------------------------------------------------------------------------------

    def _nonzero(self, tensor: torch.Tensor) -> torch.Tensor:
        """The places of a tensor that are not zero: a row each."""
        key = (self._traced.value(tensor), version_of(tensor))
        if key not in self._places:
            there = tensor
            if tensor.dtype is not torch.bool:
                there = self._record(aten.ne.Scalar, (tensor, 0), {})
            total = self._record(aten.sum.default, (there,), {})
            count = self._ask(total, int, "the number of places in a mask")
            fixed = {"size": count, "fill_value": 0}
            self._places[key] = self._record(aten.nonzero_static.default, (tensor,), fixed)
        return self._places[key]

    def _columns(self, mask: torch.Tensor) -> Sequence[torch.Tensor]:
        return self._record(aten.unbind.int, (self._nonzero(mask), 1), {})

    def _indices(self, indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The same places without masks."""
        found: list[torch.Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype in MASKS:
                found += self._columns(index)
            else:
                found.append(index)
        return found

    def _index(self, tensor: torch.Tensor, indices: Sequence[Any]) -> tuple[Any, ...]:
        if not _has_mask(indices):
            return ()
        return (self._record(INDEX, (tensor, self._indices(indices)), {}),)

    def _put(
        self,
        op: Any,
        tensor: torch.Tensor,
        indices: Sequence[Any],
        values: torch.Tensor,
        accumulate: bool = False,
        unsafe: bool = False,
    ) -> tuple[Any, ...]:
        if not _has_mask(indices) or values.numel() == 1:
            return ()  # one value fits any number of places
        return (self._record(op, (tensor, self._indices(indices), values, accumulate), {}),)

    def _scatter(
        self, op: Any, tensor: torch.Tensor, mask: torch.Tensor, source: torch.Tensor
    ) -> tuple[Any, ...]:
        mask = mask.expand(tensor.size())
        columns = [*self._columns(mask)]
        own = self._record(aten.reshape.default, (source, [-1]), {})
        values = self._record(aten.slice.Tensor, (own, 0, 0, columns[0].numel()), {})
        return (self._record(op, (tensor, columns, values), {}),)


def _has_mask(indices: Iterable[Any]) -> bool:
    return any(index is not None and index.dtype in MASKS for index in indices)
