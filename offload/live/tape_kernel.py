"""A kernel of a tape, whose numbers may differ from step to step: a rate, a bias correction.

measured    op(*args)              with the numbers that were recorded
in a plan   bound(args) -> run()   a call without arguments, with the numbers of the step
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from offload.torch_seams import set_grad_enabled


@dataclass(frozen=True, slots=True)
class WithAutograd:
    """Calls the op with autograd on, as it was in the step: an LSTM's kernel keeps a workspace only
    then. No argument requires a gradient, so autograd keeps nothing."""

    op: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = torch.is_grad_enabled()
        set_grad_enabled(True)
        try:
            return self.op(*args, **kwargs)
        finally:
            set_grad_enabled(before)


@dataclass(frozen=True, slots=True)
class TapeKernel:
    """What a node of a tape calls."""

    of_torch: Any
    core: Any = field(compare=False, repr=False)
    node: Any = field(compare=False, repr=False)
    numbers: Any = field(compare=False, repr=False)
    """The numbers of the step that runs next."""
    varying: tuple[Any, ...] = field(compare=False)
    """Which arguments have a number that differs from step to step."""
    device: torch.device
    elementwise: bool
    """Whether it treats every element alike, wherever in a tensor it lies."""

    @property
    def alike(self) -> Any:
        """Which numbers differ makes no difference to what a call costs."""
        return TapeKernel, self.of_torch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.of_torch(*args, **kwargs)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Any]:
        """The call with these tensors."""
        given = [*args, *kwargs.values()]  # in the order of the schema
        return self.core.bind(self.node, given, list(self.varying), self.numbers)

    def chain(self, runs: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
        """What runs these one after the other, and returns nothing."""
        return self.core.chain(tuple(runs))

    def cut(self, where: slice, whole: int, lengths: Sequence[int]) -> "TapeKernel":
        """The same for a part of its lists of length `whole`. `lengths`: those of its arguments."""
        kept = []
        for number in self.varying:
            if number.element < 0 or lengths[number.argument] != whole:
                kept.append(number)
            elif where.start <= number.element < where.stop:
                element = number.element - where.start
                kept.append(self.core.Varying(number.argument, element, number.index, number.dtype))
        return replace(self, varying=tuple(kept))
