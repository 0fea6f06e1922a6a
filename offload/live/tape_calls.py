"""The deferred nodes of a tape as calls of kernels, and what each of them reads and writes.

node   mul(slot 3, slot 7, 0.9) -> slot 12      TapeCall(Call(aten.mul, (v3, v7, 0.9), outputs=v12))

Geometry, aliases and results were recorded from kernels that ran, so nothing is guessed. Numbers
that differ from run to run are read when the call runs (tape_kernel.py).
"""

import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offload.errors import CaptureError
from offload.live.tape_kernel import TapeKernel, WithAutograd
from offload.program.kernels import Call, Value, values_in
from offload.torch_seams import ASKING_AUTOGRAD, schema_of

Slots = dict[int, None]
"""Numbers of storages, in order."""
OVERWRITING = frozenset(
    {"fill_", "zero_", "copy_", "bernoulli_", "uniform_", "normal_", "random_", "exponential_"}
    | {"geometric_", "cauchy_", "log_normal_"}
)
"""Ops that overwrite their first argument without reading it."""
ALLOCATIONS = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
)
"""Ops that only make memory."""
EXACT_OPS = frozenset({
    "add", "sub", "rsub", "mul", "div", "neg", "abs", "sqrt", "reciprocal", "addcmul", "addcdiv",
    "lerp", "maximum", "minimum", "clamp", "clamp_min", "clamp_max", "sign", "where", "masked_fill",
    "gt", "lt", "ge", "le", "eq", "ne", "copy", "clone", "zero", "fill", "zeros", "zeros_like",
    "ones_like", "full_like", "empty_like", "empty_strided",
})  # fmt: skip
"""Ops that treat every element alike, wherever in a tensor it lies: their results are rounded once.
(An `exp` or a `pow` has other last bits in the loop for a tensor's last elements.)"""


@dataclass(slots=True)
class TapeCall:
    """What a node does."""

    op: str
    call: Call
    reads: Slots
    writes: Slots
    pointwise: bool
    random: bool
    """Whether it draws random numbers."""
    node: Any


@dataclass(frozen=True, slots=True)
class NamedOp:
    """An op by its name on a tape, as `aten::mul.Tensor`."""

    op: Any
    name: str
    arguments: Sequence[Any]
    """The arguments of its schema."""
    keywords: Sequence[str]
    """The last of these, which are given by name."""


@functools.cache
def find_op(full_name: str) -> NamedOp:
    space, name, overload = full_name.replace("::", ".").split(".")
    op = getattr(getattr(getattr(torch.ops, space), name), overload)
    arguments = schema_of(op).arguments
    return NamedOp(op, name, arguments, [a.name for a in arguments if a.kwarg_only])


class TapeReader:
    """Reads the kernels that wait since the last cut of a tape."""

    def __init__(
        self,
        core: Any,
        tape: Any,
        varying: Collection[int],
        device: torch.device,
        *,
        whole: bool = False,
    ) -> None:
        """`tape`: a pass of it. `varying`: the numbers that are read at every run. So are all in
        tensors of the host, which some kernels copy: a CUDA graph cannot keep that. `whole`: also
        what has run."""
        self._core = core
        self.varying = {*varying}
        self.device = device
        self.numbers = core.StepNumbers()
        """The numbers of the step that runs next."""
        self.numbers.take(tape)  # kernels are measured with them
        self._tensors: dict[Any, torch.Tensor] = {}
        self._values: dict[Any, Value] = {}
        self.nbytes: dict[int, int] = {}
        """By slot: the bytes of its storage."""
        self.allocated: set[int] = set()
        """Slots whose memory is made here."""
        self.touched: dict[int, tuple[int, int]] = {}
        """By slot: the first byte that the tape's tensors cover, and the end of the last."""
        nodes = list(zip(tape.nodes, tape.ran, strict=True))[0 if whole else tape.begin :]
        calls = [self._read(node) for node, ran in nodes if node.deferred and not ran]
        self.calls = [call for call in calls if call is not None]
        self.written = {slot for call in self.calls for slot in call.writes}

    def _read(self, node: Any) -> TapeCall | None:
        """The call of a node; None if it only makes memory."""
        named = find_op(node.op)
        op = named.op
        made = tuple(None if value is None else self._value(value) for value in node.made)
        if named.name in ALLOCATIONS:
            self.allocated.update(value.buffer for value in made if value is not None)
            return None
        given = [self._argument(value) for value in node.arguments]
        first = len(given) - len(named.keywords)
        asks = node.grad and named.name in ASKING_AUTOGRAD
        kernel = TapeKernel(
            WithAutograd(op) if asks else op,
            self._core,
            node,
            self.numbers,
            tuple(self._varying_of(node.arguments)),
            self.device,
            _is_elementwise(named.name),
        )
        fresh = dict.fromkeys(value.buffer for value in made if value is not None)
        kwargs = dict(zip(named.keywords, given[first:], strict=True))
        call = Call(kernel, tuple(given[:first]), kwargs, made if fresh else ())
        reads = self._reads(named, given)
        writes = dict.fromkeys(node.written) | fresh
        random = node.random and not _drops_nothing(named, given)
        return TapeCall(node.op, call, reads, writes, torch.Tag.pointwise in op.tags, random, node)

    def _reads(self, op: NamedOp, given: list[Any]) -> Slots:
        """All storages that it is given, but those that it overwrites completely."""
        slots: Slots = {}
        for position, (argument, value) in enumerate(zip(op.arguments, given, strict=True)):
            anew = argument.is_out or (position == 0 and op.name in OVERWRITING)
            for leaf in values_in(value):
                if not (anew and self._covers(leaf)):
                    slots[leaf.buffer] = None
        return slots

    def _argument(self, given: Any) -> Any:
        if isinstance(given, self._core.Value):
            return self._value(given)
        if isinstance(given, self._core.Number):
            if given.dtype is not None and not given.of_python:
                self.varying.add(given.index)
            varies = given.index in self.varying
            number = type(given.recorded)(1) if varies else given.recorded
            return number if given.dtype is None else self._tensor(number, given)
        if not isinstance(given, list):
            return given
        if any(isinstance(leaf, self._core.Value) and leaf.lazy for leaf in given):
            raise CaptureError(
                "a list of lazily conjugated or negated tensors has no place in a plan"
            )
        return [self._argument(leaf) for leaf in given]

    def _tensor(self, number: Any, given: Any) -> torch.Tensor:
        """The tensor that has a number; the same for equal numbers."""
        key = type(number), repr(number), given.dtype, given.of_python
        if key not in self._tensors:
            self._tensors[key] = self._core.number_tensor(number, given.dtype, given.of_python)
        return self._tensors[key]

    def _varying_of(self, arguments: Sequence[Any]) -> Iterator[Any]:
        """The numbers among the arguments that differ from run to run."""
        for place, given in enumerate(arguments):
            of_list = isinstance(given, list)
            for element, leaf in enumerate(given if of_list else [given]):
                if isinstance(leaf, self._core.Number) and leaf.index in self.varying:
                    element = element if of_list else -1
                    yield self._core.Varying(place, element, leaf.index, leaf.dtype)

    def _value(self, value: Any) -> Value:
        if (made := self._values.get(value)) is not None:
            return made
        if value.is_zero:
            raise CaptureError("a tensor of zeros that has no memory has no place in a plan")
        if value.device != self.device.type:
            raise CaptureError(f"a tensor on {value.device} in a step on {self.device}")
        made = Value(value.slot, value.dtype, value.size, value.stride, value.offset)
        self._values[value] = made
        self.nbytes.setdefault(value.slot, value.nbytes)
        begin = end = 0  # an empty tensor may begin behind the end of its storage
        if 0 not in made.size:
            begin = made.offset * made.dtype.itemsize
            last = sum((n - 1) * step for n, step in zip(made.size, made.stride, strict=True))
            end = begin + (last + 1) * made.dtype.itemsize
        first, past = self.touched.get(value.slot, (begin, end))
        self.touched[value.slot] = min(first, begin), max(past, end)
        return made

    def _covers(self, value: Value) -> bool:
        """Whether a tensor covers every byte of its storage once."""
        count = 1
        for stride, size in sorted(zip(value.stride, value.size, strict=True)):
            if size != 1 and stride != count:
                return False
            count *= size
        return count * value.dtype.itemsize == self.nbytes[value.buffer]


def _drops_nothing(op: NamedOp, given: Sequence[Any]) -> bool:
    """Whether it is attention without dropout, which draws nothing."""
    pairs = zip(op.arguments, given, strict=True)
    return any(argument.name == "dropout_p" and value == 0 for argument, value in pairs)


def _is_elementwise(name: str) -> bool:
    plain = name.removeprefix("_foreach_").removesuffix("_")
    return plain in EXACT_OPS or name.startswith("_fused_")
