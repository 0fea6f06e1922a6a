"""What a graph fixes when it is captured, and what of it has changed since.

Python values that the step read   requires_grad   the optimizer's structure   torch's settings
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from offload.optimizer.fixed_settings import fixed_settings
from offload.torch_seams import hook_keys
from offload.watching.watched_state import WatchedState


def torch_settings() -> tuple[Any, ...]:
    """Return torch's settings that choose ops while a step is traced. Autocast is none of them: a
    step may be captured in its block and run outside of it."""
    cuda = torch.backends.cuda
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
    )


@dataclass(frozen=True, slots=True, eq=False)
class FixedAtCapture:
    """All that must be as it was for a captured graph to do what the step would do now."""

    watched: WatchedState
    tensors: tuple[torch.Tensor, ...]
    """The tensors of the step whose `requires_grad` and hooks count."""
    optimizer: Optimizer | None
    expected: tuple[Any, ...]

    @classmethod
    def of(
        cls,
        watched: WatchedState,
        tensors: Sequence[torch.Tensor],
        optimizer: Optimizer | None,
    ) -> "FixedAtCapture":
        return cls(watched, tuple(tensors), optimizer, _facts(tensors, optimizer))

    def changed(self) -> str:
        """Say what has changed since the capture; empty if nothing has."""
        now = _facts(self.tensors, self.optimizer)
        if now != self.expected:
            names = ("requires_grad", "the hooks of tensors", "the optimizer", "torch's settings")
            pairs = zip(names, now, self.expected, strict=True)
            return next(f"{name} changed" for name, new, old in pairs if new != old)
        if self.watched.same():
            return ""
        return str(self.watched.changes()[0])


def _facts(tensors: Sequence[torch.Tensor], optimizer: Optimizer | None) -> tuple[Any, ...]:
    return (
        tuple([t.requires_grad for t in tensors]),
        hook_keys(tensors),
        None if optimizer is None else fixed_settings(optimizer),
        torch_settings(),
    )
