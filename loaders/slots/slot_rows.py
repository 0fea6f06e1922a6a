"""The memory of one column of a slab: a row for each slot, and the arrays outside their rows.

row   |  slot 0  |  slot 1  |  slot 2  |  slot 3  |      the template's size: the usual case
         in place  smaller:    larger:     lent: it points into the decoded cache, nothing
                   fits in     memory of   is copied
                   the row     its own
"""

import threading
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaders.errors import BufferTooSmall
from loaders.pixels.kernels import address

Array = NDArray[Any]


class ByteBudget:
    """The bytes that all columns of a slab together may use, rows and larger slots."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._used = 0
        self._lock = threading.Lock()

    def reserve(self, nbytes: int, slot_bytes: int) -> None:
        """Reserve `nbytes` for a slot of `slot_bytes`. A negative number releases bytes."""
        with self._lock:
            if self.limit is not None and self._used + nbytes > self.limit:
                raise BufferTooSmall(
                    f"a sample of {slot_bytes} bytes does not fit: the buffer holds"
                    f" {self._used} of at most {self.limit} bytes; raise buffer_bytes, lower"
                    " batch_size, or store smaller samples"
                )
            self._used += nbytes


class SlotRows:
    """Where the array of each slot is. Different threads may use different slots."""

    def __init__(self, memory: Array, shape: tuple[int, ...], budget: ByteBudget) -> None:
        """`memory` has a row for each slot. Before a slot is written, its array has `shape`."""
        self.memory = memory
        self._budget = budget
        self.is_elsewhere = np.zeros(len(memory), dtype=bool)
        """Which slots' arrays are not their row, or have another shape."""
        self._elsewhere: dict[int, Array] = {}
        self._larger: dict[int, Array] = {}
        """The memory of slots whose arrays do not fit into their rows."""
        # The kernels need addresses. They are kept because asking numpy for them is slow.
        row_bytes = memory.nbytes // len(memory)
        self.addresses = memory.ctypes.data + np.arange(len(memory), dtype=np.int64) * row_bytes
        self.sizes = np.tile(np.array(shape, np.int64), (len(memory), 1))

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes + sum(array.nbytes for array in list(self._larger.values()))

    def row(self, slot: int) -> Array:
        return self._elsewhere[slot] if self.is_elsewhere[slot] else self.memory[slot, ...]

    def arrays_elsewhere(self, slots: NDArray[np.int64]) -> list[Array]:
        return [self._elsewhere[slot] for slot in slots[self.is_elsewhere[slots]].tolist()]

    def room(self, slot: int, shape: tuple[int, ...]) -> Array:
        """The memory of `slot` for an array of `shape`."""
        if shape == self.memory.shape[1:]:
            row = self.memory[slot, ...]
            if self.is_elsewhere[slot]:
                self._elsewhere.pop(slot, None)
                self._note(slot, row, elsewhere=False)
            return row
        count, limited = prod(shape), self._budget.limit is not None
        if count <= self.memory[0].size:
            if limited:
                self.free_larger(slot)
            row = self.memory[slot].reshape(-1)[:count].reshape(shape)
        else:
            larger = self._larger.get(slot)
            # If memory is limited, a slot keeps only what it needs now.
            if larger is None or larger.size < count or (limited and larger.size > count):
                needed = count * self.memory.itemsize
                self._budget.reserve(needed - (0 if larger is None else larger.nbytes), needed)
                larger = self._larger[slot] = np.empty(count, self.memory.dtype)
            row = larger[:count].reshape(shape)
        self.point_to(slot, row)
        return row

    def point_to(self, slot: int, array: Array) -> None:
        """Let `slot` be an array that is not its row."""
        self._elsewhere[slot] = array
        self._note(slot, array, elsewhere=True)

    def clear(self, slot: int, size: tuple[int, ...]) -> None:
        """Forget the array of `slot`, which had this size: only crops of it are kept."""
        self.free_larger(slot)
        self._elsewhere.pop(slot, None)
        self.is_elsewhere[slot] = False
        self.sizes[slot] = size

    def free_larger(self, slot: int) -> None:
        if (larger := self._larger.pop(slot, None)) is not None:
            self._budget.reserve(-larger.nbytes, 0)

    def _note(self, slot: int, array: Array, elsewhere: bool) -> None:
        self.is_elsewhere[slot] = elsewhere
        self.addresses[slot] = address(array)
        self.sizes[slot] = array.shape
