"""The gradients of all parameters in one flat tensor, into which the backward passes add.

sums  | p0 ............ | p1 .... | p2 ......... |      p.grad is a view of its part
marks    x                          x                   which parameters got a gradient
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainers.elastic.errors import CannotBeElastic, FixedPointError

LIMIT_BITS = 14
TOTAL_BITS = 62
BLOCK = 1 << 18
"""Numbers that are converted at a time: their float64 copies stay in the cache."""


@dataclass(frozen=True, slots=True)
class FixedPoint:
    """How numbers of a run with so many lanes are written as integers, whose sums have equal bits
    in any order. A step is 2**-k, with k = 48 - ceil(log2(lanes)), so lanes of numbers up to 2**14
    add up to 2**62 at most: int64 never wraps, and what is below half a step is lost."""

    lanes: int

    def __post_init__(self) -> None:
        if not 1 <= self.lanes <= 1 << 24:
            raise FixedPointError(f"{self.lanes} lanes: exact sums take 1 to {1 << 24} lanes")

    @property
    def fraction_bits(self) -> int:
        return TOTAL_BITS - LIMIT_BITS - (self.lanes - 1).bit_length()

    def add(self, sums: torch.Tensor, gradient: torch.Tensor, what: str) -> None:
        """Add one lane's flat gradient to flat int64 sums. `what` names the lane in an error.

        All numbers are looked at before the first is added: after an error the sums are as before.
        """
        if sums.dtype != torch.int64 or sums.shape != gradient.shape or sums.dim() != 1:
            raise FixedPointError(
                f"{what}: the sums are {tuple(sums.shape)} of {sums.dtype}, the gradient is"
                f" {tuple(gradient.shape)}: both must be flat and alike, and the sums int64"
            )
        limit = 2.0**LIMIT_BITS
        for start in range(0, gradient.numel(), BLOCK):
            block = gradient[start : start + BLOCK]
            if not bool((block.abs() <= limit).all()):
                at = int((~(block.abs() <= limit)).nonzero()[0])
                raise FixedPointError(
                    f"{what}: number {start + at} of {gradient.numel()} is {float(block[at])};"
                    f" exact sums take finite numbers up to {limit:g}. Scale the loss down, or use"
                    ' sum="fast"'
                )
        scale = 2.0**self.fraction_bits
        for start in range(0, gradient.numel(), BLOCK):
            block = gradient[start : start + BLOCK].double().mul_(scale).round_()
            sums[start : start + BLOCK].add_(block.long())

    def floats(self, sums: torch.Tensor, out: torch.Tensor) -> None:
        """Write the numbers that flat int64 sums of all lanes stand for into a float32 tensor."""
        most = self.lanes << (LIMIT_BITS + self.fraction_bits)
        scale = 2.0**-self.fraction_bits
        for start in range(0, sums.numel(), BLOCK):
            block = sums[start : start + BLOCK]
            if int(block.max()) > most or int(block.min()) < -most:
                raise FixedPointError(
                    f"a sum of {self.lanes} lanes is out of the range that so many lanes can reach:"
                    " a lane was added more than once, or the sums are damaged"
                )
            out[start : start + BLOCK].copy_(block.double().mul_(scale))


def check_float32(parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
    """Raise `CannotBeElastic` if gradients cannot be added up in float32."""
    for name, p in parameters:
        if p.dtype != torch.float32:
            raise CannotBeElastic(
                f"the parameter {name} is of {p.dtype}, and a swarm adds up gradients in"
                " float32: keep parameters in float32 (precision bf16-mixed computes in"
                " bfloat16 and does that)"
            )


class GradientSums:
    """The sums of one module's parameters that are trained."""

    def __init__(self, parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        check_float32(parameters)
        self._parameters = [p for _, p in parameters]
        self._names = [name for name, _ in parameters]
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        count = sum(p.numel() for p in self._parameters)
        device = self._parameters[0].device if self._parameters else torch.device("cpu")
        self._flat = torch.zeros(count, device=device)
        self._views = self.views(self._flat)
        self._marks = [False] * len(self._parameters)

    @property
    def flat(self) -> Tensor:
        """The sums of all parameters."""
        return self._flat

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the parts of a flat tensor, in the shapes of the parameters."""
        parts = flat.split([p.numel() for p in self._parameters])
        return [shape_as(part, p) for part, p in zip(parts, self._parameters, strict=True)]

    def begin(self) -> None:
        """Begin a step: nothing is added up, and backward passes add to the sums."""
        self.clear()
        self._marks = [False] * len(self._parameters)
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._mark(number))
            for number, p in enumerate(self._parameters)
        ]
        self.catch()

    def clear(self) -> None:
        """Forget what is added up."""
        self._flat.zero_()

    def catch(self) -> None:
        """Let backward passes add to the sums."""
        for p, view in zip(self._parameters, self._views, strict=True):
            p.grad = view

    def end(self) -> None:
        """Let go of the parameters' gradients."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for p in self._parameters:
            p.grad = None

    def _mark(self, number: int) -> Callable[[Tensor], None]:
        def mark(_: Tensor) -> None:
            self._marks[number] = True

        return mark

    @property
    def touched(self) -> str:
        """Which parameters got a gradient, a bit each, in hexadecimal."""
        return hex(sum(1 << number for number, mark in enumerate(self._marks) if mark))

    def give(self, mean: Tensor, touched: str) -> None:
        """Make the parts of `mean` the gradients of those parameters that `touched` names."""
        self._put(self.views(mean.to(self._flat.device)), touched)

    def _put(self, gradients: Sequence[Tensor], touched: str) -> None:
        marks = int(touched, 16)
        for number, (p, gradient) in enumerate(zip(self._parameters, gradients, strict=True)):
            p.grad = gradient if marks >> number & 1 else None

    def wrong_names(self) -> list[str]:
        """The parameters whose sums are not finite."""
        named = zip(self._names, self._views, strict=True)
        return [name for name, view in named if not view.isfinite().all()]


def shape_as(part: Tensor, p: Tensor) -> Tensor:
    """Return a flat part in the shape of a parameter, and in its order in memory (channels last),
    as autograd and fused updates expect it."""
    return part.as_strided(p.shape, p.stride()) if is_dense(p) else part.view(p.shape)


def is_dense(p: Tensor) -> bool:
    """Whether a parameter fills its memory, in whatever order, and has no holes or overlaps."""
    return torch.empty_like(p, device="meta").stride() == p.stride()


class SeparateSums(GradientSums):
    """Sums that a plan moves. It moves whole memory blocks, so each parameter has a tensor of its
    own: they are gathered for a reduce, and a commit's mean is copied back."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        home_of: Callable[[Tensor], Tensor],
    ) -> None:
        """`home_of`: where a tensor's bytes are between two steps."""
        super().__init__(parameters)
        self._flat = torch.zeros(self._flat.numel())
        self._views = [shape_as(torch.zeros(p.numel()), p) for p in self._parameters]
        self._home_of = home_of

    @property
    def tensors(self) -> Sequence[Tensor]:
        return self._views

    @property
    def flat(self) -> Tensor:
        """The sums in one tensor on the host. It is filled anew each time."""
        for part, total in zip(self.views(self._flat), self._views, strict=True):
            part.copy_(self._home_of(total))
        return self._flat

    def clear(self) -> None:
        for total in self._views:
            self._home_of(total).zero_()

    def give(self, mean: Tensor, touched: str) -> None:
        for total, part in zip(self._views, self.views(mean), strict=True):
            self._home_of(total).copy_(part)
        self._put(self._views, touched)

    def wrong_names(self) -> list[str]:
        named = zip(self._names, self._views, strict=True)
        return [name for name, total in named if not self._home_of(total).isfinite().all()]


class ExactSums:
    """Sums of whole numbers: the same bits for every dealing of the lanes, and every order."""

    def __init__(self, count: int, lanes: int) -> None:
        self.sums = torch.zeros(count, dtype=torch.int64)
        self._rule = FixedPoint(lanes)

    def begin(self) -> None:
        self.sums.zero_()

    def take(self, flat: Tensor, what: str) -> None:
        """Add one lane's gradients. The caller clears them for the next lane's."""
        self._rule.add(self.sums, flat.cpu(), what)

    def floats(self, total: Tensor) -> Tensor:
        """Return what a sum over all lanes stands for."""
        out = torch.empty(total.numel())
        self._rule.floats(total, out)
        return out
