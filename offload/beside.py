"""What the code of a step for a GPU does on the CPU, beside the step's own tensors.

    torch.tensor(2.0) * x            a number: given to the kernel as it is, at every run
    torch.arange(n).to(x.device)     made of numbers written down: computed once, a constant then
    mask_of_mine.to(x.device)        the user's own tensor: copied at every run, as eager does
    x.cpu()   own_number + 1         a tensor of the step, or the user's: refused, with the line

A captured step has one device. What on the CPU depends on nothing but the step's code is the same
at every run (the trace is made twice, and both are compared), so it is folded.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from offload.errors import CaptureError
from offload.kernels import CPU
from offload.trees import mapped, tensors_of

FOLDED, OWN = "folded", "own"
"""Storages on the CPU: made of numbers in the step's code; the user's."""
MOVES = frozenset({"_to_copy", "lift_fresh_copy"})

Real = Callable[[torch.Tensor], torch.Tensor | None]
"""What a fake on the CPU stands for, where that is known while the step is traced."""


def is_beside(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether it lies on the CPU while the step has another device."""
    return device.type != "cpu" and tensor.device == CPU


def fold(
    func: Any, args: Any, kwargs: Any, result: Any, changed: Sequence[torch.Tensor], real: Real
) -> Sequence[tuple[torch.Tensor, torch.Tensor]] | None:
    """Computes an op whose tensors are all folded ones: the fakes that it makes, each with its
    values. None: it has others, or draws, and cannot be folded."""
    given = tensors_of((args, kwargs))
    values = {id(t): real(t) for t in given}
    if any(value is None for value in values.values()):
        return None
    if torch.Tag.nondeterministic_seeded in func.tags:
        return None
    with _disable_current_modes(), torch.no_grad():
        own = mapped((tuple(args), kwargs), lambda t: values[id(t)])
        found = func(*own[0], **own[1])
        if changed:
            return ()  # in place
        return [
            (fake, _laid_out(true, fake))
            for fake, true in zip(tensors_of(result), tensors_of(found), strict=True)
        ]


def moved(name: str, args: Any, result: Any, real: Real) -> torch.Tensor | None:
    """The values of a folded tensor that an op brings to the step's device, if it does that."""
    if name not in MOVES or not isinstance(result, torch.Tensor):
        return None
    source = real(args[0])
    if source is None:
        return None
    with _disable_current_modes():
        return _laid_out(source.to(result.dtype), result)


def refused(
    where: str, name: str, device: torch.device, given: Sequence[torch.Tensor]
) -> Exception:
    if any(not is_beside(t, device) for t in given):
        what = f"{name} brings a tensor of the step from {device} to the CPU"
        advice = "Keep it there, or return it from the step and bring it to the CPU afterwards"
    else:
        what = f"{name} computes on the CPU in the middle of a step on {device}"
        advice = (
            "Make its tensors on the step's device (torch.randn(n, device=x.device), a registered"
            " buffer), or compute it before the step"
        )
    return CaptureError(f"{where}: {what}. {advice}")


def _laid_out(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor of its own on the CPU."""
    own = torch.empty_strided(like.size(), like.stride(), dtype=values.dtype)
    return own.copy_(values)
