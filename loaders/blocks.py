"""Memory for batches, used again once nobody holds the batch.

Fresh memory for every batch costs page faults, more than gathering its pixels does. But a batch is
the consumer's own: it may keep it as long as it likes. So a block comes back only when the last
array or tensor over it is gone:

    array() -> Lease -> numpy array -> torch tensor, views, slices ...
                 '-- dies with the last of them: the block is free again

Pinned memory is left to torch, whose allocator also waits for copies that are under way.
"""

import threading
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class Blocks:
    """At most `spare` blocks wait to be used again."""

    def __init__(self, spare: int, pin_memory: bool = False) -> None:
        self._spare = spare
        self._pin_memory = pin_memory
        self._free: list[NDArray[np.uint8]] = []
        self._lock = threading.Lock()
        self.made_bytes = 0
        """Memory in circulation: waiting, being filled, or with the consumer."""

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Memory with anything in it."""
        nbytes = int(np.prod(shape)) * dtype.itemsize
        if self._pin_memory:
            pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
            return pinned.view(dtype).reshape(shape)
        return np.asarray(_Lease(self, self._take(nbytes), nbytes)).view(dtype).reshape(shape)

    def _take(self, nbytes: int) -> NDArray[np.uint8]:
        with self._lock:
            for number, block in enumerate(self._free):
                if nbytes <= block.nbytes <= 2 * nbytes:  # a last batch may be smaller
                    return self._free.pop(number)
            if self._free:  # they are of another size: the oldest goes
                self.made_bytes -= self._free.pop(0).nbytes
            self.made_bytes += nbytes
        return np.empty(nbytes, np.uint8)

    def give_back(self, block: NDArray[np.uint8]) -> None:
        with self._lock:
            self._free.append(block)
            if len(self._free) > self._spare:
                self.made_bytes -= self._free.pop(0).nbytes


class _Lease:
    """Lends a block for as long as an array over it lives."""

    def __init__(self, blocks: Blocks, block: NDArray[np.uint8], nbytes: int) -> None:
        self._blocks = blocks
        self._block = block
        # numpy's protocol for memory that somebody else owns.
        self.__array_interface__ = block[:nbytes].__array_interface__

    def __del__(self) -> None:
        self._blocks.give_back(self._block)
