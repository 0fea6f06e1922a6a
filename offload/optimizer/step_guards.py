"""Watches a user's own `step()` while it runs: it must do what was found when it was captured.

A branch that no trace has seen, at some later step or learning rate, might compute with a whole
parameter where the plan gives it a piece, or with all parameters where it gives one. Then the
update is an error, before anybody uses it. torch's own optimizers run without this.
"""

from collections.abc import Sequence
from typing import Any

import torch

from offload.errors import StepError
from offload.optimizer.step_spy import SILENT, VALUE
from offload.program.trees import tensors_of
from offload.torch_seams import TorchDispatchMode, name_of

EXACT_OPS = frozenset({
    "add", "sub", "rsub", "mul", "div", "neg", "abs", "sqrt", "reciprocal", "addcmul", "addcdiv",
    "lerp", "maximum", "minimum", "clamp", "clamp_min", "clamp_max", "sign", "where", "masked_fill",
    "gt", "lt", "ge", "le", "eq", "ne", "copy", "clone", "zero", "fill", "zeros", "zeros_like",
    "ones_like", "full_like", "empty_like", "empty_strided",
})  # fmt: skip
"""Ops that treat every element alike, wherever in a tensor it lies: their results are rounded once.
(An `exp` or a `pow` has other last bits in the loop for a tensor's last elements.)"""


def plain_name(func: Any) -> str:
    """`add` of `aten._foreach_add_.Scalar`."""
    return name_of(func).removeprefix("_foreach_").removesuffix("_")


class StepGuard(TorchDispatchMode):
    """Raises where a step does something that was not found before."""

    def __init__(self, name: str, known: frozenset[str], size: torch.Size | None) -> None:
        """`known`: the names of ops that were found. `size`: of the parameter or its piece, if the
        step must work element by element."""
        super().__init__()
        self._name = name
        self._known = known
        self._size = size

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = plain_name(func)
        if name_of(func) in SILENT or name_of(func) == VALUE:
            return result
        if name not in self._known and name not in EXACT_OPS:
            raise self._unknown(f"calls {func}")
        if self._size is not None:
            for tensor in tensors_of((args, kwargs, result)):
                if tensor.numel() != 1 and tensor.size() != self._size:
                    raise self._unknown(f"makes {tuple(tensor.size())} of {tuple(self._size)}")
        return result

    def _unknown(self, what: str) -> StepError:
        return StepError(
            f"optimizer {self._name}: its step {what}, which it did not do when it was captured, so"
            " its plan may be wrong. Train without offloading, or capture the step again from here"
        )
