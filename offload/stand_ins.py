"""Tensors of the user's that for the time of a trace claim to lie on the step's device.

    before, after     p.data -> [host memory]            wherever its home is
    traced            p.data -> (device cuda:0, nothing) same size, strides, offset, sharing

Which kernels a step comes down to depends on the devices of its tensors, and autograd compares
those of leaves and gradients. But a model may be larger than the device, or in part at home in host
memory. A stand-in has a storage and no memory: its address can be read by nobody, and nobody reads
it, because under fake tensors nothing is computed. Tensors that share a storage share the stand-in.

All is put back whatever happens. Only `.data` changes, so versions, hooks and histories stay.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from offload.errors import CaptureError
from offload.kernels import CPU

NOWHERE = 1 << 12
"""An address in the one page that no process has."""


def device_of(
    device: torch.device | str | None, batch: Sequence[torch.Tensor], own: Iterable[torch.Tensor]
) -> torch.device:
    """Where a step is to run. None: where all its tensors are, single numbers on the CPU aside."""
    if device is not None:
        return _numbered(torch.device(device))
    tensors = [*batch, *own]
    found = dict.fromkeys(t.device for t in tensors if t.dim() or t.device != CPU)
    if len(found) > 1:
        raise CaptureError(
            f"the step's tensors lie on {' and '.join(sorted(map(str, found)))}: say where it is to"
            " run, as in capture(..., device='cuda:0'); they may stay where they are"
        )
    return next(iter(found), CPU)


def _numbered(device: torch.device) -> torch.device:
    if device.type not in ("cpu", "cuda"):
        raise CaptureError(f"device {device}: a step can be captured for cpu or for cuda")
    if device.type == "cpu":
        return CPU
    if device.index is not None:
        return device
    index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    return torch.device("cuda", index)


@contextmanager
def standing_in(tensors: Iterable[torch.Tensor], device: torch.device) -> Iterator[None]:
    """Stand-ins for those that are elsewhere, and for all that share a storage with them."""
    originals: list[tuple[torch.Tensor, torch.Tensor]] = []
    storages: dict[int, Any] = {}
    try:
        for tensor in {id(t): t for t in tensors}.values():
            if is_away(tensor, device):
                key = tensor.untyped_storage()._cdata
                if key not in storages:
                    storages[key] = _storage(tensor.untyped_storage().nbytes(), device)
                _swap(tensor, storages[key], device, originals)
        yield
    finally:
        for tensor, original in reversed(originals):
            tensor.data = original


def is_away(tensor: torch.Tensor, device: torch.device) -> bool:
    return tensor.device != device


def claim(device: torch.device, dtype: torch.dtype, size: Sequence[int] = (0,)) -> torch.Tensor:
    """A contiguous tensor that says it lies there, without memory."""
    nbytes = torch.empty(size, dtype=dtype, device="meta").untyped_storage().nbytes()
    like = torch.empty(size, dtype=dtype, device="meta")
    return _over(_storage(nbytes, device), like, device)


def _storage(nbytes: int, device: torch.device) -> Any:
    return torch._C._construct_storage_from_data_pointer(NOWHERE, device, nbytes)


def _over(storage: Any, like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Laid out alike."""
    if device.type == "cpu":
        empty = torch.empty(0, dtype=like.dtype)
        return empty.set_(storage, like.storage_offset(), like.size(), like.stride())
    return torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(
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
        # What was made in inference mode takes no data that was not.
        with torch.inference_mode(tensor.is_inference()):
            original = tensor.data
            stand_in = _over(storage, tensor, device)
        tensor.data = stand_in
    except RuntimeError as error:
        raise CaptureError(
            f"a {type(tensor).__name__} {tuple(tensor.size())} on {tensor.device} cannot be traced"
            f" for {device} ({str(error).splitlines()[0][:200]}): move it there first"
        ) from error
    originals.append((tensor, original))
