"""A module on a device that may have no room for it: its tensors are there, without their bytes.

a parameter    where it was            its bytes
within         looks like the device   none: they stay where they were, and plans move them
afterwards     where it was            its present bytes
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from offload.tracing.collectives import check_own_bytes


@contextmanager
def placed(
    core: Any, module: torch.nn.Module, device: torch.device
) -> Iterator[Mapping[torch.Tensor, Any]]:
    """Within it, all tensors of the module are on the device. Yields what stands for those that
    were elsewhere: a tensor's number, itself and its home."""
    everything = dict.fromkeys((*module.parameters(), *module.buffers()))
    tensors = [tensor for tensor in everything if tensor.device.type != device.type]
    for tensor in tensors:
        check_own_bytes(tensor, f"the module has a tensor that is not on {device}")
    before = [tensor.device for tensor in tensors]
    places = core.place([tensor.data for tensor in tensors], str(device))
    for tensor, place in zip(tensors, places, strict=True):
        tensor.data = place.tensor
    try:
        yield dict(zip(tensors, places, strict=True))
    finally:
        adopted = {*core.adopted()}
        for tensor, place, where in zip(tensors, places, before, strict=True):
            at_home = place.id in adopted and core.identity(tensor) == core.identity(place.tensor)
            tensor.data = _bytes_at_home(place) if at_home else tensor.data.to(where)


def _bytes_at_home(place: Any) -> torch.Tensor:
    like = place.tensor
    whole = place.home.view(like.dtype)
    return whole.as_strided(like.size(), like.stride(), like.storage_offset())
