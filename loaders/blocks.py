"""Memory for batches, which is used again when nobody holds the batch any longer.

Fresh memory for every batch costs page faults, which take longer than gathering the batch's pixels.
A block is free again only when the last array or tensor over it is gone: its reference count tells
that. No finalizer does: its Python code runs between any two lines of the consumer, and a Ctrl-C
that strikes there is swallowed. Pinned memory is left to torch's allocator.
"""

import sys
import threading
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_listed = (object(),)
ONLY_LISTED = sys.getrefcount(_listed[0])
"""What `getrefcount` returns for an object that only a list holds."""
KEPT = 16
"""This many blocks that the consumer keeps are remembered; older ones are forgotten."""


def floats_like(images: torch.Tensor) -> torch.Tensor:
    """Undefined float32 values, which lie in fresh memory as the pixels of `images` do."""
    return torch.empty_like(images, dtype=torch.float32)


class Blocks:
    """Blocks of memory, of which at most `spare` wait to be used again."""

    def __init__(self, spare: int, pin_memory: bool = False) -> None:
        self._spare = spare
        self._pin_memory = pin_memory
        self._blocks: list[NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    @property
    def made_bytes(self) -> int:
        """The bytes of all blocks: those that wait, are being filled, or are with the consumer."""
        with self._lock:
            return sum(block.nbytes for block in self._blocks)

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """An array whose values are undefined."""
        nbytes = prod(shape) * dtype.itemsize
        if self._pin_memory:
            pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
            return pinned.view(dtype).reshape(shape)
        return self._take(nbytes)[:nbytes].view(dtype).reshape(shape)

    def floats_like(self, images: torch.Tensor) -> torch.Tensor:
        """What the function does, in a block of memory, where `images` are in a CPU's memory."""
        if not images.is_cpu:
            return floats_like(images)
        strides = torch.empty_like(images, device="meta").stride()
        floats = torch.from_numpy(self.array((images.numel(),), np.dtype(np.float32)))
        return floats.as_strided(images.shape, strides)

    def _take(self, nbytes: int) -> NDArray[np.uint8]:
        with self._lock:
            blocks = self._blocks
            idle = [n for n in range(len(blocks)) if sys.getrefcount(blocks[n]) == ONLY_LISTED]
            for number in idle:
                if nbytes <= blocks[number].nbytes <= 2 * nbytes:  # a last batch may be smaller
                    return blocks[number]
            # The idle blocks have another size. The oldest is freed, and so are all that are more
            # than `spare`.
            for number in reversed(idle[: max(1, len(idle) - self._spare)]):
                del blocks[number]
            del blocks[: max(0, len(blocks) - self._spare - KEPT)]
            blocks.append(np.empty(nbytes, np.uint8))
            return blocks[-1]
