"""Pillow's antialiased resize, with Pillow's bits, of the part of a picture that will be seen.

`csrc/resize.c` does it. Pillow itself resizes where the processor has no AVX2, where the kernels
were not compiled or a few pictures came out otherwise, and where it may begin with the rows.
"""

import ctypes
import functools
from dataclasses import dataclass

import numpy as np
from PIL import Image

from loaders.pixels.crops import Box, PicturePart, Sides
from loaders.pixels.jpegs import Jpeg, Pixels, Room
from loaders.pixels.kernels import address, kernel_library


@dataclass(frozen=True, slots=True)
class Resizing:
    """What torchvision's `Resize` does to a picture of Pillow."""

    size: tuple[int, ...]
    """Height and width, or the shorter side alone."""
    cubic: bool = False
    """Bicubic, and not bilinear."""

    def sides(self, height: int, width: int) -> Sides:
        """What a picture of this height and width becomes."""
        if len(self.size) == 2:
            return self.size[0], self.size[1]
        short, longer = self.size[0], int(self.size[0] * max(height, width) / min(height, width))
        return (longer, short) if width <= height else (short, longer)

    def begins_with_columns(self, height: int, width: int) -> bool:
        """Whether every version of Pillow resizes along the rows of such a picture first, as we do.
        (From 13 on, it does not where the height shrinks by more than twice as much.)"""
        tall, wide = self.sides(height, width)
        return height <= tall or height - tall <= 2 * (width - wide)

    def source(self, whole: Sides, window: Box) -> Box:
        """The pixels of a picture of these sides that a window of the result is made of."""
        size, reach = self.sides(*whole), 2 if self.cubic else 1
        (top, tall), (left, wide) = (
            _span(whole[axis], size[axis], window[axis], window[axis + 2], reach) for axis in (0, 1)
        )
        return top, left, tall, wide

    def decoded(self, jpeg: Jpeg, room: Room) -> Pixels:
        """The pixels of a JPEG, resized: all of them, or those that `room` says will be seen."""
        whole = jpeg.height, jpeg.width
        size = self.sides(*whole)
        window = room.crops.union(*size) if room.crops else (0, 0, *size)
        pixels, part = jpeg.decode_box(self.source(whole, window), room.scratch)
        out = room.memory((window[2], window[3], 3))
        self.resize(pixels, part, whole, window, out)
        if room.crops and window[2:] != size:
            room.crops.part = PicturePart(window[0], window[1], *size)
        return out

    def resize(self, pixels: Pixels, part: Box, whole: Sides, window: Box, out: Pixels) -> None:
        """Make a window of the result, from `pixels`, which are this part of the whole picture."""
        assert pixels.shape == (*part[2:], 3) and out.shape == (*window[2:], 3)
        assert pixels.flags.c_contiguous and out.flags.c_contiguous
        library = kernel_library()
        assert not isinstance(library, str)  # `resizes` says so
        at = address(pixels)
        call = _ResizeCall(at, part, whole, self.sides(*whole), window, self.cubic, address(out))
        error = library.pictures_resize(ctypes.byref(call))
        if error == -1:
            raise MemoryError("there is no memory to resize a picture: use less memory elsewhere")
        if error:
            raise ValueError(f"window {window} of a picture of {whole} needs more than {part}")


def _span(whole: int, size: int, first: int, count: int, reach: int) -> tuple[int, int]:
    """The first pixel that these outputs are made of, and their number."""
    scale = whole / size
    support = reach * max(scale, 1.0)
    low = max(0, int((first + 0.5) * scale - support + 0.5))
    high = min(whole, int((first + count - 0.5) * scale + support + 0.5))
    return low, high - low


class _ResizeCall(ctypes.Structure):
    """The same fields as `struct resizing` of csrc/resize.c."""

    _fields_ = (
        ("source", ctypes.c_void_p),
        ("part", ctypes.c_int32 * 4),
        ("whole", ctypes.c_int32 * 2),
        ("size", ctypes.c_int32 * 2),
        ("window", ctypes.c_int32 * 4),
        ("cubic", ctypes.c_int32),
        ("out", ctypes.c_void_p),
    )


@functools.cache
def resizes() -> bool:
    """Whether we can resize here: a few pictures were resized, and came out with Pillow's bits."""
    library = kernel_library()
    if isinstance(library, str):
        return False
    library.pictures_resize.argtypes = (ctypes.c_void_p,)
    random = np.random.default_rng(0)
    for height, width, size in ((61, 47, (40, 31)), (40, 90, (52,)), (100, 80, (30,))):
        picture = random.integers(0, 256, (height, width, 3), np.uint8)
        whole = height, width
        for cubic in (False, True):
            ours = Resizing(size, cubic)
            tall, wide = ours.sides(*whole)
            out = np.empty((tall, wide, 3), np.uint8)
            try:
                ours.resize(picture, (0, 0, *whole), whole, (0, 0, tall, wide), out)
            except ValueError:  # the processor cannot
                return False
            how = Image.Resampling.BICUBIC if cubic else Image.Resampling.BILINEAR
            theirs = np.asarray(Image.fromarray(picture).resize((wide, tall), how))
            if not np.array_equal(out, theirs):
                return False
    return True
