"""The crops of a sample in its slot, where they take less memory than the picture.

    slot    | view 0: serve 0 | serve 1 | view 1: serve 0 | serve 1 |      rows of pixels, uint8

They are cut out of the picture as soon as it is decoded, while it is still in the processor's
caches. So a batch is made of contiguous pixels, and the whole picture is not kept.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaders.pixels.crops import Box, Crops, PicturePart, Sides, scaled
from loaders.pixels.kernels import address, fit


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
