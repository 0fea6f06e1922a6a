"""A copy of a batch that nobody else holds: what one consumer changes in it, no other one sees.

Large tensors are copied into memory of earlier copies that their consumer has let go of.
"""

from typing import Any

import numpy as np
import torch

from loaders.blocks import Blocks
from loaders.device import tensors_of
from loaders.slots.leaves import as_kind, attributes_of, kind_of, own_object

HELD = 2
"""A consumer holds so many batches at a time, as a rule."""
LARGE = 1 << 16
"""From so many bytes on, memory is used again."""


class BatchCopies:
    """Makes the copies of one consumer."""

    def __init__(self, pin_memory: bool) -> None:
        self._blocks = Blocks(HELD, pin_memory)

    @property
    def nbytes(self) -> int:
        return self._blocks.made_bytes

    def copy(self, batch: Any) -> Any:
        """Return a copy of `batch` with the same values, strides and nest."""
        places = [t.untyped_storage().data_ptr() for t in tensors_of(batch) if t.nbytes]
        with torch.inference_mode(False):
            # Only a deep copy keeps two tensors together that share their memory.
            return self._own(batch) if len({*places}) == len(places) else own_object(batch)

    def _own(self, part: Any) -> Any:
        if isinstance(part, torch.Tensor) and not part.requires_grad:
            plain = self._own_tensor(part.as_subclass(torch.Tensor))
            return as_kind(plain, kind_of(part), attributes_of(part))
        if type(part) is dict:
            return {key: self._own(value) for key, value in part.items()}
        if isinstance(part, tuple) and hasattr(part, "_fields"):
            return type(part)(*(self._own(value) for value in part))
        if type(part) in (list, tuple):
            return type(part)(self._own(value) for value in part)
        return own_object(part)

    def _own_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        order = sorted(range(tensor.ndim), key=lambda n: -tensor.stride(n))
        rows = tensor.permute(order)
        if tensor.nbytes < LARGE or not rows.is_contiguous() or tensor.device.type != "cpu":
            return tensor.clone()
        memory = self._blocks.array((tensor.nbytes,), np.dtype(np.uint8))
        made = torch.from_numpy(memory).view(tensor.dtype).view(rows.shape)
        made.copy_(rows)
        return made.permute([order.index(n) for n in range(tensor.ndim)])


def is_pinned(batch: Any) -> bool:
    """Return whether a batch lies in page-locked memory."""
    return torch.cuda.is_available() and any(t.is_pinned() for t in tensors_of(batch))
