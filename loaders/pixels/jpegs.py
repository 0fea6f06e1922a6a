"""JPEGs, decoded by the libjpeg that Pillow has loaded: all of a picture, or what will be seen.

    picture                    window               what is decoded
    +--------------------+     top, left,           +--------------------+
    |                    |     height, width        | (entropy only)     |
    |     +------+       |                          |  #+------+##       |
    |     |      |       |                          |  #|      |##       |   to whole blocks
    |     +------+       |                          |  #+------+##       |
    |                    |                          | (never reached)    |
    +--------------------+                          +--------------------+

`csrc/jpegs.c` does it. Pixels are Pillow's to the last bit, because the library is Pillow's own.
Where the kernels were not compiled, or Pillow shares no libjpeg, Pillow itself decodes.
"""

import ctypes
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from loaders.pixels import kernels

Pixels = NDArray[np.uint8]
Shape = tuple[int, int, int]
"""Height, width, channels."""
Box = tuple[int, int, int, int]
"""Top, left, height, width."""
Seen = Callable[[int, int], Box]
"""The box of a picture of some height and width that will be seen."""
PRINTED = (4, 5)
"""libjpeg's numbers for CMYK and YCCK, the colours of printers."""
MESSAGE = 200


class PicturePart(NamedTuple):
    """Which part of a picture lies in memory."""

    top: int
    left: int
    height: int
    width: int
    """The last two: of the whole picture."""


@dataclass(frozen=True, slots=True)
class Room:
    """Where the pixels of one picture go."""

    memory: Callable[[Shape, PicturePart | None], Pixels]
    """Gives memory for these pixels. If they are not the whole picture, it is told which part."""
    seen: Seen | None = None
    """What will be seen of the picture. None: all of it must be decoded."""

    def __call__(self, shape: Shape) -> Pixels:
        return self.memory(shape, None)


ANYWHERE = Room(lambda shape, _: np.empty(shape, np.uint8))


def begins_as_jpeg(data: bytes) -> bool:
    return data[:2] == b"\xff\xd8"


def is_jpeg(data: bytes) -> bool:
    """Whether it begins and ends as a JPEG does."""
    return begins_as_jpeg(data) and data[-2:] == b"\xff\xd9"


def decodes_jpegs() -> bool:
    """Whether JPEGs can be decoded here without Pillow's own code."""
    return _library() is not None


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
        height, width = (-(-side * eighths // 8) for side in (self.height, self.width))
        box = room.seen(height, width) if room.seen else (0, 0, height, width)
        if min(box) < 0 or box[0] + box[2] > height or box[1] + box[3] > width:
            raise ValueError(f"box {box} is not inside its picture of {height}x{width}")
        window = (ctypes.c_int32 * 4)(*box)
        self._check(self._library.jpeg_begin(self._reading, eighths, window))
        top, left, tall, wide = window
        whole = (tall, wide) == (height, width)
        part = None if whole else PicturePart(top, left, height, width)
        pixels = room.memory((tall, wide, 3), part)
        self._check(self._library.jpeg_rows(self._reading, pixels.ctypes.data, tall))
        return pixels

    def _check(self, error: bytes | None) -> None:
        if error:
            raise ValueError(error.decode())


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = kernels.kernel_library()
    if isinstance(library, str):
        return None  # `kernels` warns of it
    pointer, text = ctypes.c_void_p, ctypes.c_char_p
    library.jpegs_bind.argtypes = (text,)
    library.jpeg_open.argtypes = (text, ctypes.c_int64, pointer, text)
    library.jpeg_open.restype = pointer
    library.jpeg_begin.argtypes = (pointer, ctypes.c_int, pointer)
    library.jpeg_begin.restype = text
    library.jpeg_rows.argtypes = (pointer, pointer, ctypes.c_int32)
    library.jpeg_rows.restype = text
    library.jpeg_close.argtypes = (pointer,)
    library.jpeg_close.restype = None
    # Its symbols are looked for in the libraries that it loaded, too.
    return None if library.jpegs_bind(os.fsencode(str(Image.core.__file__))) else library
