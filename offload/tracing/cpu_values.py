"""Handles ops that the code of a step for a GPU runs on the CPU.

    torch.tensor(2.0) * x            a number: the kernel gets it as it is, at every run
    torch.arange(n).to(x.device)     made of numbers in the code: computed once, then a constant
    mask_of_mine.to(x.device)        the user's own tensor: copied at every run, as eager does
    x.cpu()   own_number + 1         needs values of the step or of the user: refused with the line

A captured step has one device. A CPU value that depends on nothing but the step's code is the same
at every run (the trace is made twice and compared), so it is computed once: it is folded.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from offload.errors import CaptureError
from offload.program.kernels import CPU
from offload.program.trees import mapped, tensors_of
from offload.torch_seams import TO_COPY, disable_current_modes

FOLDED, OWN = "folded", "own"
"""Kinds of storages on the CPU: made of numbers in the step's code, or the user's own."""
MOVES = frozenset({TO_COPY, "lift_fresh_copy"})

Real = Callable[[torch.Tensor], torch.Tensor | None]
"""Gives the values that a fake on the CPU stands for, or None where they are not known yet."""


def is_cpu_value(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor lies on the CPU while the step runs on another device."""
    return device.type != "cpu" and tensor.device == CPU


def fold(
    func: Any, args: Any, kwargs: Any, result: Any, changed: Sequence[torch.Tensor], real: Real
) -> Sequence[tuple[torch.Tensor, torch.Tensor]] | None:
    """Compute an op whose tensors are all folded. Returns the fakes that it makes, each with
    values.

    None: it reads other tensors or draws random numbers, and cannot be folded."""
    given = tensors_of((args, kwargs))
    values = {id(t): real(t) for t in given}
    if any(value is None for value in values.values()):
        return None
    if torch.Tag.nondeterministic_seeded in func.tags:
        return None
    with disable_current_modes(), torch.no_grad():
        own = mapped((tuple(args), kwargs), lambda t: values[id(t)])
        found = func(*own[0], **own[1])
        if changed:
            return ()  # the op worked in place
        return [
            (fake, _laid_out(true, fake))
            for fake, true in zip(tensors_of(result), tensors_of(found), strict=True)
        ]


def moved(name: str, args: Any, result: Any, real: Real) -> torch.Tensor | None:
    """The values of a folded tensor, if the op brings it to the step's device."""
    if name not in MOVES or not isinstance(result, torch.Tensor):
        return None
    source = real(args[0])
    if source is None:
        return None
    with disable_current_modes():
        return _laid_out(source.to(result.dtype), result)


def refused(
    where: str, name: str, device: torch.device, given: Sequence[torch.Tensor]
) -> Exception:
    if any(not is_cpu_value(t, device) for t in given):
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
    """A copy of the values on the CPU, laid out like the fake."""
    own = torch.empty_strided(like.size(), like.stride(), dtype=values.dtype)
    return own.copy_(values)
