"""How the results of a kernel lie, and of which type they are, where fakes do not know it.

    a picture of one pixel   (8, 64, 1, 1)   channels first or last? the kernel that comes looks
    batch norm               bfloat16 pictures, float32 weights: statistics of which type?

Then the real kernel runs once, over zeros of the right shape, and the fake result is made like its
result. For a step on a GPU that is done on the GPU, where there is one. Where there is none the
fake's answer stays. A stride that differs at run time is no wrong result: placement.py copies
such an output into the planned layout, and a type that differs is an error at the first run.
"""

from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from offload.trees import leaves, mapped, tensors_of

MIXING = frozenset({"native_batch_norm", "native_batch_norm_backward"})
"""Of half precision with weights of full precision: fakes do not know the types of the results."""


def as_it_is(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> Any:
    """The result, laid out and typed as the real kernel's."""
    if any(map(_is_ambiguous, leaves(result))) or (name in MIXING and _is_mixed(args)):
        return _like_the_real_one(func, args, kwargs, result)
    return result


def _is_ambiguous(out: Any) -> bool:
    """A picture of one pixel: its channels lie the same way first and last, and a kernel that
    looks at strides takes another path for each."""
    if not isinstance(out, torch.Tensor) or not _can_run(out):
        return False
    return out.dim() > 3 and out.size(1) > 1 and all(n == 1 for n in out.size()[2:])


def _is_mixed(args: Any) -> bool:
    given = tensors_of(args)
    return all(map(_can_run, given)) and len({t.dtype for t in given if t.is_floating_point()}) > 1


def _can_run(tensor: torch.Tensor) -> bool:
    """Whether there is such a device here."""
    kind = tensor.device.type
    return kind == "cpu" or (kind == "cuda" and torch.cuda.is_available())


def _like_the_real_one(func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    if func.is_view or func._schema.is_mutable:
        return result
    devices: set[int] = set()

    def real(t: torch.Tensor) -> torch.Tensor:
        if t.device.type == "cuda":
            devices.add(t.device.index or 0)
        return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device).zero_()

    with _disable_current_modes():
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
