"""Makes the user's tensors claim to lie on the step's device while it is traced.

    before, after     p.data -> [host memory]            wherever its home is
    traced            p.data -> (device cuda:0, nothing) same size, strides, offset, sharing

The devices of a step's tensors decide which kernels it calls, and autograd compares the devices of
leaves and gradients. But a model may be larger than the device, or partly live in host memory. A
stand-in has a storage without memory. Nothing is computed under fake tensors, so nothing reads its
address; who computes nevertheless, because the step asks for a value, reads the original. Tensors
that share a storage share its stand-in.

Everything is put back even after an error. Only `.data` changes, so versions, hooks and histories
stay.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from offload.errors import CaptureError
from offload.program.kernels import CPU
from offload.torch_seams import cuda_tensor_over, storage_at, storage_key

NOWHERE = 1 << 12
"""An address in the first page, which no process has."""


def device_of(
    device: torch.device | str | None, batch: Sequence[torch.Tensor], own: Iterable[torch.Tensor]
) -> torch.device:
    """The device of a step. By default where all its tensors are; single numbers on the CPU do not
    count."""
    if device is not None:
        return _numbered(torch.device(device))
    tensors = [*batch, *own]
    found = dict.fromkeys(t.device for t in tensors if t.dim() or t.device != CPU)
    if len(found) > 1:
        raise CaptureError(
            f"the step's tensors lie on {' and '.join(sorted(map(str, found)))}. Name the device"
            " that it shall run on, as in capture(..., device='cuda:0'); the tensors may stay"
            " where they are"
        )
    return next(iter(found), CPU)


def _numbered(device: torch.device) -> torch.device:
    if device.type not in ("cpu", "cuda"):
        raise CaptureError(f"device {device}: a step can only be captured for cpu or cuda")
    if device.type == "cpu":
        return CPU
    if device.index is not None:
        return device
    index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    return torch.device("cuda", index)


@contextmanager
def standing_in(
    tensors: Iterable[torch.Tensor], device: torch.device
) -> Iterator[Mapping[int, torch.Tensor]]:
    """Swap in stand-ins for the tensors on other devices, for all that share their storages, and
    for their gradients: a trace takes those away and puts them back. In the block, whoever has the
    key of a stand-in's storage finds a tensor over the original one."""
    every = [*tensors]
    every += [t.grad for t in every if t.is_leaf and t.grad is not None]
    originals: list[tuple[torch.Tensor, torch.Tensor]] = []
    storages: dict[int, Any] = {}
    away: dict[int, torch.Tensor] = {}
    try:
        for tensor in {id(t): t for t in every}.values():
            if is_away(tensor, device):
                key = storage_key(tensor)
                if key not in storages:
                    storages[key] = _storage(tensor.untyped_storage().nbytes(), device)
                _swap(tensor, storages[key], device, originals)
        away.update((storage_key(tensor), original) for tensor, original in originals)
        yield away
    finally:
        away.clear()
        for tensor, original in reversed(originals):
            tensor.data = original


def is_away(tensor: torch.Tensor, device: torch.device) -> bool:
    return tensor.device != device


def claim(device: torch.device, dtype: torch.dtype, size: Sequence[int] = (0,)) -> torch.Tensor:
    """A contiguous tensor that claims to lie on the device and has no memory."""
    nbytes = torch.empty(size, dtype=dtype, device="meta").untyped_storage().nbytes()
    like = torch.empty(size, dtype=dtype, device="meta")
    return _over(_storage(nbytes, device), like, device)


def _storage(nbytes: int, device: torch.device) -> Any:
    return storage_at(NOWHERE, device, nbytes)


def _over(storage: Any, like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor over the storage, laid out like another one."""
    if device.type == "cpu":
        empty = torch.empty(0, dtype=like.dtype)
        return empty.set_(storage, like.storage_offset(), like.size(), like.stride())
    return cuda_tensor_over(
        {
            "dtype": like.dtype,
            "size": tuple(like.size()),
            "stride": tuple(like.stride()),
            "storage_offset": like.storage_offset(),
        },
        storage,
    )


def _swap(tensor: torch.Tensor, storage: Any, device: torch.device, originals: list[Any]) -> None:
    try:
        # A tensor made in inference mode accepts only data that was made in it, too.
        with torch.inference_mode(tensor.is_inference()):
            original = tensor.data
            stand_in = _over(storage, tensor, device)
        tensor.data = stand_in
    except RuntimeError as error:
        raise CaptureError(
            f"a {type(tensor).__name__} {tuple(tensor.size())} on {tensor.device} cannot be traced"
            f" for {device} ({str(error).splitlines()[0][:200]}). Move it to {device} first"
        ) from error
    originals.append((tensor, original))
