"""Finds layouts, dtypes and sizes of a kernel's results where fakes do not know them.

    a picture of one pixel   (8, 64, 1, 1)   channels first or last? the next kernel depends on it
    batch norm               bfloat16 pictures, float32 weights: which dtype have the statistics?

In these cases the real kernel runs once over zeros of the right shape, and the fake result is made
like its result. For a step on a GPU it runs on the GPU if there is one; otherwise, and where the
kernel fails on zeros, the fake's answer stays. All other wrong fakes are found when kernels are
measured (fake_answers.py). Where nothing was measured, the first run copies an output of other
strides, and refuses other sizes and dtypes.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from offload.errors import CaptureError
from offload.program.trees import leaves, mapped, tensors_of
from offload.torch_seams import disable_current_modes, schema_of

MIXING = frozenset({"native_batch_norm", "native_batch_norm_backward"})
"""Ops that take half precision with full-precision weights; fakes miss their results' dtypes."""
_Result = tuple[torch.Size, tuple[int, ...], torch.dtype]


class KernelLayouts:
    """Remembers what it found: blocks of a net are alike, and every step is traced twice."""

    def __init__(self) -> None:
        self._real_results = lru_cache(maxsize=4096)(_real_results)

    def as_it_is(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> Any:
        """The result with the layout and dtype of the real kernel's result."""
        doubtful = any(map(_is_ambiguous, leaves(result))) or (name in MIXING and _is_mixed(args))
        if not doubtful or func.is_view or schema_of(func).is_mutable:
            return result
        arguments = _described((tuple(args), dict(kwargs)))
        true = self._real_results(func, arguments, torch.is_grad_enabled())
        if true is None:
            return result
        fakes = zip(leaves(result), true, strict=True)
        told = iter([found for fake, found in fakes if isinstance(fake, torch.Tensor)])
        return mapped(result, lambda fake: _alike(fake, next(told)))


def _alike(fake: torch.Tensor, found: _Result | None) -> torch.Tensor:
    """The fake, made anew if the kernel's result has another size, dtype or layout."""
    if found is None:
        return fake
    size, stride, dtype = found
    same = (fake.size(), fake.dtype) == (size, dtype)
    if same and (not _is_ambiguous(fake) or fake.stride() == stride):
        return fake
    return torch.empty_strided(size, stride, dtype=dtype, device=fake.device)


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


@dataclass(frozen=True, slots=True)
class _Zeros:
    """Stands for a tensor of zeros among the arguments of an op."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _described(tree: Any) -> Any:
    """The arguments of an op as something that can be a key of a dict."""
    if isinstance(tree, torch.Tensor):
        return _Zeros(tree.size(), tree.stride(), tree.dtype, tree.device)
    if isinstance(tree, list | tuple):
        return list, tuple(map(_described, tree))
    if isinstance(tree, dict):
        return dict, tuple((name, _described(branch)) for name, branch in tree.items())
    if isinstance(tree, torch.Generator):
        return type(None), None  # whichever draws, the layout is the same
    return type(tree), tree  # because 1 == 1.0 == True


def _restored(described: Any) -> Any:
    if isinstance(described, _Zeros):
        zeros = torch.empty_strided(
            described.size, described.stride, dtype=described.dtype, device=described.device
        )
        return zeros.zero_()
    kind, value = described
    if kind is list:
        return [_restored(branch) for branch in value]
    if kind is dict:
        return {name: _restored(branch) for name, branch in value}
    return value


def _real_results(func: Any, arguments: Any, grad: bool) -> tuple[_Result | None, ...] | None:
    """Size, strides and dtype of each of the kernel's results over zeros; None for no tensor, and
    for a kernel that fails on zeros."""
    with disable_current_modes(), torch.set_grad_enabled(grad):
        args, kwargs = _restored(arguments)
        cards = {t.device.index or 0 for t in tensors_of((args, kwargs)) if t.device.type == "cuda"}
        with torch.random.fork_rng(devices=sorted(cards)):
            try:
                found = func(*args, **kwargs)
            except Exception:
                return None  # profiling.py says so where it runs the kernel too
    return tuple(
        (out.size(), out.stride(), out.dtype) if isinstance(out, torch.Tensor) else None
        for out in leaves(found)
    )


def check_dense(tensor: torch.Tensor, where: str) -> None:
    """Refuse a tensor whose bytes are not laid out by sizes and strides alone."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        what = f"a tensor of layout {tensor.layout}"
    elif tensor.is_conj() or tensor.is_neg():
        what = "a lazy conjugate (call .resolve_conj() on it)"
    else:
        return
    raise CaptureError(f"{where}: {what} cannot be planned; only dense tensors can")
