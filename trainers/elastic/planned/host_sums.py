"""The sums of the gradients where a plan adds them up: a tensor of its own for each parameter.

    sums    | p0 ........ |  | p1 .. |  | p2 .... |     the plan's: each has memory of its own
                  |             |           |           gathered
    flat    | p0 ........ p1 .. p2 .... |               what a reduce reads
                                                        scattered: a commit's total
    totals  | p0 ........ |  | p1 .. |  | p2 .... |     what the update reads

A plan moves whole memory blocks, so its sums cannot be parts of the flat tensor.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from trainers.elastic.errors import CannotBeElastic
from trainers.elastic.working.gradient_sums import check_float32, laid_out

Parameter = torch.nn.Parameter


class HostSums:
    """The sums of one module's parameters that are trained. It stands in for `GradientSums`
    (working/gradient_sums.py)."""

    def __init__(self, parameters: Sequence[tuple[str, Parameter]]) -> None:
        check_float32(parameters)
        self._names = [name for name, _ in parameters]
        self._parameters = [p for _, p in parameters]
        self.sums: dict[Parameter, Tensor] = {p: torch.zeros_like(p) for p in self._parameters}
        self.totals: dict[Parameter, Tensor] = {p: torch.zeros_like(p) for p in self._parameters}
        self._flat = torch.zeros(sum(p.numel() for p in self._parameters))
        self._touched: set[Parameter] = set()

    def begin(self) -> None:
        """Begin a step: nothing is added up."""
        self._touched.clear()
        self.clear()

    def clear(self) -> None:
        """Forget what is added up."""
        for total in self.sums.values():
            total.zero_()

    def end(self) -> None:
        """Nothing is left to let go of: no plan fills `.grad`."""

    def touch(self, parameters: Iterable[Parameter]) -> None:
        """Note that a lane had gradients of these parameters."""
        self._touched.update(parameters)

    @property
    def flat(self) -> Tensor:
        """The sums in one tensor on the host. It is filled anew each time."""
        for part, p in zip(self._parts(self._flat), self._parameters, strict=True):
            part.copy_(self.sums[p])
        return self._flat

    @property
    def touched(self) -> str:
        """Which parameters got a gradient, a bit each, in hexadecimal."""
        marks = (number for number, p in enumerate(self._parameters) if p in self._touched)
        return hex(sum(1 << number for number in marks))

    def named(self, touched: str) -> tuple[Parameter, ...]:
        """Return the parameters that `touched` names."""
        marks = int(touched, 16)
        return tuple(p for number, p in enumerate(self._parameters) if marks >> number & 1)

    def scatter(self, total: Tensor) -> None:
        """Copy a flat total to `totals`, where the update reads it."""
        for part, p in zip(self._parts(total), self._parameters, strict=True):
            self.totals[p].copy_(part)

    def wrong_names(self) -> list[str]:
        """The parameters whose sums are not finite."""
        named = zip(self._names, self._parameters, strict=True)
        return [name for name, p in named if not self.sums[p].isfinite().all()]

    def check_whole(self) -> None:
        """Raise `CannotBeElastic` if a capture has found a parameter that has no place in `flat`:
        it was frozen when the run began."""
        if len(self.sums) != len(self._parameters):
            known = set(self._parameters)
            shapes = [tuple(p.shape) for p in self.sums if p not in known]
            raise CannotBeElastic(
                f"parameters of shapes {shapes} were frozen when the run began and are trained now:"
                " a swarm's sums have no place for them; unfreeze them before fit"
            )

    def _parts(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([p.numel() for p in self._parameters])
        return [laid_out(part, p) for part, p in zip(parts, self._parameters, strict=True)]
