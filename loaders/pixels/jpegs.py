"""JPEGs, decoded by the libjpeg that Pillow has loaded: all of a picture, or what will be seen.

    rows above the window    their entropy code alone is read
    the window               decoded to whole blocks around it
    rows below it            never reached

`csrc/jpegs.c` does it. Pixels are Pillow's to the last bit, because the library is Pillow's own.
Where the kernels were not compiled, or Pillow shares no libjpeg, Pillow itself decodes.
"""

import ctypes
import functools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from loaders.pixels import kernels
from loaders.pixels.crops import Box, Crops, PicturePart, scaled

Pixels = NDArray[np.uint8]
Shape = tuple[int, int, int]
"""Height, width, channels."""
Memory = Callable[[Shape], Pixels]
PRINTED = (4, 5)
"""libjpeg's numbers for CMYK and YCCK, the colours of printers."""
MESSAGE = 200


def fresh(shape: Shape) -> Pixels:
    return np.empty(shape, np.uint8)


@dataclass(frozen=True, slots=True)
class Room:
    """Where the pixels of one picture go."""

    memory: Memory
    """Gives memory for these pixels, or for more than them."""
    crops: Crops | None = None
    """What will be seen of the picture. A decoder notes there what it decoded. None: all of it."""
    scratch: Memory = fresh
    """Gives memory for pixels that are not kept."""


ANYWHERE = Room(fresh)


def begins_as_jpeg(data: bytes) -> bool:
    return data[:2] == b"\xff\xd8"


def is_jpeg(data: bytes) -> bool:
    """Whether it begins and ends as a JPEG does."""
    return begins_as_jpeg(data) and data[-2:] == b"\xff\xd9"


def decodes_jpegs() -> bool:
    """Whether JPEGs can be decoded here without Pillow's own code."""
    return _library() is not None


class DecodeCounts:
    """Counts of one source. Any thread may call any method. A pickled copy begins with nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}

    def __reduce__(self) -> tuple[type["DecodeCounts"], tuple[()]]:
        return DecodeCounts, ()

    def add(self, kind: str, *, native: bool) -> None:
        """Count a picture of a format: "JPEG"."""
        self.merge({f"{kind} {'natively' if native else 'by Pillow'}": 1})

    def merge(self, counts: dict[str, int]) -> None:
        """Add the counts of another process."""
        with self._lock:
            for name, count in counts.items():
                self._counts[name] = self._counts.get(name, 0) + count

    def take_all(self) -> dict[str, int]:
        """The counts since the last call."""
        with self._lock:
            counts, self._counts = self._counts, {}
        return counts

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(sorted(self._counts.items()))


class Jpeg:
    """A JPEG whose head was read. It can be decoded once. ValueError: it is damaged."""

    def __init__(self, data: bytes) -> None:
        library = _library()
        assert library is not None  # `decodes_jpegs` says so
        self._library, self._data = library, data
        about, why = (ctypes.c_int32 * 3)(), ctypes.create_string_buffer(MESSAGE)
        self._reading = library.jpeg_open(data, len(data), about, why)
        if not self._reading:
            raise ValueError(why.value.decode())
        self.height, self.width, space = about
        self.printed = space in PRINTED

    def __enter__(self) -> "Jpeg":
        return self

    def __exit__(self, *_: object) -> None:
        self._library.jpeg_close(self._reading)

    def decode(self, room: Room, eighths: int = 8) -> Pixels:
        """The RGB pixels at so many eighths of the size, or the part of them that `room` says will
        be seen."""
        whole = self.height, self.width
        box = room.crops.union(*whole) if room.crops else (0, 0, *whole)
        pixels, (top, left, *sides) = self.decode_box(box, room.memory, eighths)
        if room.crops and (*sides,) != whole:
            room.crops.part = PicturePart(top, left, *whole, eighths)
        return pixels

    def decode_box(self, box: Box, memory: Memory, eighths: int = 8) -> tuple[Pixels, Box]:
        """The RGB pixels that hold a box of the picture, and which ones they are."""
        if min(box) < 0 or box[0] + box[2] > self.height or box[1] + box[3] > self.width:
            raise ValueError(f"box {box} is not inside its picture of {self.height}x{self.width}")
        window = (ctypes.c_int32 * 4)(*scaled(box, eighths))
        pixels = memory((window[2], -(-self.width * eighths // 8), 3))
        error = self._library.jpeg_decode(self._reading, eighths, window, kernels.address(pixels))
        if error:
            raise ValueError(error.decode())
        top, left, tall, wide = window
        if pixels.shape[:2] != (tall, wide):  # a part of the columns
            pixels = pixels.reshape(-1)[: tall * wide * 3].reshape(tall, wide, 3)
        return pixels, (top, left, tall, wide)


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = kernels.kernel_library()
    if isinstance(library, str):
        return None  # `kernels` warns of it
    pointer, text = ctypes.c_void_p, ctypes.c_char_p
    library.jpegs_bind.argtypes = (text,)
    library.jpeg_open.argtypes = (text, ctypes.c_int64, pointer, text)
    library.jpeg_open.restype = pointer
    library.jpeg_decode.argtypes = (pointer, ctypes.c_int, pointer, pointer)
    library.jpeg_decode.restype = text
    library.jpeg_close.argtypes = (pointer,)
    library.jpeg_close.restype = None
    # Its symbols are looked for in the libraries that it loaded, too.
    return None if library.jpegs_bind(os.fsencode(str(Image.core.__file__))) else library
