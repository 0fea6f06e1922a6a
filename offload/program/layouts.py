"""Finds layouts and dtypes of a kernel's results where fakes do not know them.

    a picture of one pixel   (8, 64, 1, 1)   channels first or last? the next kernel depends on it
    batch norm               bfloat16 pictures, float32 weights: which dtype have the statistics?

In these cases the real kernel runs once over zeros of the right shape, and the fake result is made
like its result. For a step on a GPU it runs on the GPU if there is one; otherwise the fake's answer
stays. All other wrong fakes are found when kernels are measured (fake_answers.py). Where nothing
was measured, the first run copies an output of other strides, and refuses other sizes and dtypes.
"""

from typing import Any

import torch

from offload.program.trees import leaves, mapped, tensors_of
from offload.torch_seams import disable_current_modes, pytree, schema_of

MIXING = frozenset({"native_batch_norm", "native_batch_norm_backward"})
"""Ops that take half precision with full-precision weights; fakes miss their results' dtypes."""


def as_it_is(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> Any:
    """The result with the layout and dtype of the real kernel's result."""
    if any(map(_is_ambiguous, leaves(result))) or (name in MIXING and _is_mixed(args)):
        return _like_the_real_one(func, args, kwargs, result)
    return result


def _is_ambiguous(out: Any) -> bool:
    """Whether it is a picture of one pixel. Channels first and last look alike there, but kernels
    that look at strides treat them differently."""
    if not isinstance(out, torch.Tensor) or not _can_run(out):
        return False
    return out.dim() > 3 and out.size(1) > 1 and all(n == 1 for n in out.size()[2:])


def _is_mixed(args: Any) -> bool:
    given = tensors_of(args)
    return all(map(_can_run, given)) and len({t.dtype for t in given if t.is_floating_point()}) > 1


def _can_run(tensor: torch.Tensor) -> bool:
    """Whether this machine has the tensor's device."""
    kind = tensor.device.type
    return kind == "cpu" or (kind == "cuda" and torch.cuda.is_available())


def _like_the_real_one(func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    if func.is_view or schema_of(func).is_mutable:
        return result
    devices: set[int] = set()

    def real(t: torch.Tensor) -> torch.Tensor:
        if t.device.type == "cuda":
            devices.add(t.device.index or 0)
        return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device).zero_()

    with disable_current_modes():
        given = mapped((tuple(args), dict(kwargs)), real)
        with torch.random.fork_rng(devices=sorted(devices)):
            found = func(*given[0], **given[1])

    def like(fake: Any, true: Any) -> Any:
        if true is None or fake is None:
            return fake
        if fake.dtype == true.dtype and (not _is_ambiguous(fake) or fake.stride() == true.stride()):
            return fake
        return torch.empty_strided(true.size(), true.stride(), dtype=true.dtype, device=fake.device)

    return pytree.tree_map(like, result, found)
