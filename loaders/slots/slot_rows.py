"""The memory of one column of a slab: a row for each slot, and the arrays outside their rows.

row   |  slot 0  |  slot 1  |  slot 2  |  slot 3  |      the template's size: the usual case
         in place  smaller:    larger:     lent: it points into the decoded cache, nothing
                   fits in     memory of   is copied
                   the row     its own

A slot may hold the crops of a picture (`CropRows`) where they take less memory. They are cut out
as soon as it is decoded, while it is in the processor's caches.
"""

import threading
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaders.errors import BufferTooSmall
from loaders.pixels.crops import Box, Crops, PicturePart, Sides, scaled
from loaders.pixels.kernels import address, fit

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
                    f"a sample of {slot_bytes} bytes does not fit: the buffer holds {self._used}"
                    f" of at most {self.limit} bytes; raise buffer_bytes, or lower batch_size"
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


@dataclass(frozen=True, slots=True)
class CropLayout:
    """Which crops lie in a slot."""

    sizes: tuple[Sides, ...]
    """The height and width of each view."""
    serves: int
    channels: int

    @property
    def nbytes(self) -> int:
        return self.start(len(self.sizes))

    def start(self, view: int) -> int:
        """Where the crops of a view begin."""
        return sum(map(prod, self.sizes[:view])) * self.channels * self.serves


class CropRows:
    """The memory for the crops of each slot. Different threads may use different slots."""

    def __init__(self, layout: CropLayout, slots: int) -> None:
        self.layout = layout
        self.memory = np.empty((slots, layout.nbytes), np.uint8)
        self._views: list[NDArray[np.uint8]] = []
        """The crops of each view: [slots, serves, height, width, channels]."""
        for view, sides in enumerate(layout.sizes):
            rows = self.memory[:, layout.start(view) : layout.start(view + 1)]
            self._views.append(rows.reshape(slots, layout.serves, *sides, layout.channels))
        self.held = np.zeros(slots, dtype=bool)
        """Which slots hold crops."""
        self._expected: dict[int, Crops] = {}

    def expect(self, slot: int, crops: Crops) -> None:
        """Keep these crops of the next picture that comes to `slot`."""
        self._expected[slot] = crops

    def keep(self, slot: int, picture: NDArray[Any]) -> Sides | None:
        """Keep the crops that are expected of a picture. Returns the size of the whole picture.
        None: they cannot be cut out of it, so it must be kept as it is."""
        self.held[slot] = False
        crops, (height, width, channels) = self._expected.pop(slot, None), picture.shape
        if crops is None or channels != self.layout.channels:
            assert crops is None or crops.part is None, "decoders write RGB"
            return None
        part = crops.part or PicturePart(0, 0, height, width)
        boxes = crops.boxes(part.height, part.width)
        for top, left, tall, wide in boxes:
            inside = min(top, left) >= 0 and top + tall <= part.height
            if not inside or left + wide > part.width:
                return None  # its serve raises the error
        picture = np.ascontiguousarray(picture)
        within: list[Box] = []
        for top, left, tall, wide in (scaled(box, part.eighths) for box in boxes):
            within.append((top - part.top, left - part.left, tall, wide))
        views = len(self._views)
        for view, memory in enumerate(self._views):
            fit(picture, within[view::views], memory[slot])
        self.held[slot] = True
        return part.height, part.width

    def addresses(
        self, slots: NDArray[np.int64], serves: NDArray[np.int64], view: int
    ) -> NDArray[np.int64]:
        """The addresses of the crops of these serves."""
        assert serves.max() < self.layout.serves, "there is a crop for each serve"
        rows = self._views[view]
        return address(rows) + slots * rows.strides[0] + serves * rows.strides[1]
