"""Sums of gradients that a plan moves: a tensor of its own for each parameter.

    sums   | p0 ........ |  | p1 .. |  | p2 .... |     p.grad; each has memory of its own
                 |             |           |           gathered for a reduce
    flat   | p0 ........ p1 .. p2 .... |
                 |             |           |           a commit's mean is given back
    sums   | p0 ........ |  | p1 .. |  | p2 .... |     p.grad, for the update

A plan moves whole memory blocks, so its sums cannot be parts of the flat tensor.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainers.elastic.working.gradient_sums import GradientSums, laid_out


class SeparateSums(GradientSums):
    """The sums of one module's parameters that are trained."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        home_of: Callable[[Tensor], Tensor],
    ) -> None:
        """`home_of`: where a tensor's bytes are between two steps."""
        super().__init__(parameters)
        self._flat = torch.zeros(self._flat.numel())
        self._views = [laid_out(torch.zeros(p.numel()), p) for p in self._parameters]
        self._home_of = home_of

    @property
    def all(self) -> Sequence[Tensor]:
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
