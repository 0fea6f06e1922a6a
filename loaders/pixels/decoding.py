"""From a picture file to pixels: this part is deterministic, done once, and kept in a slot.

    read -> decode -> fit to the stored size -> uint8 [3, height, width] over rows of RGB pixels

    stored as    size=None            the picture as it is (sizes vary, so serves must crop)
                 size=256             its central square, fitted to 256 x 256
                 size=256, square=False    its shorter side fitted to 256, its shape kept

A JPEG that is at least twice as large as it will be stored is decoded at a half, a quarter or an
eighth of its size: the decoder leaves out the frequencies that would be thrown away. Everything
random comes later, at every serve (`augmentation`). Pixels stay uint8 until they are on the device,
because making a float32 batch costs the host as much as decoding does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO, FileIO
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray
from PIL import Image

from loaders.errors import DecodeError, LoaderError
from loaders.pixels.kernels import fit

Pixels = NDArray[np.uint8]
Room = Callable[[tuple[int, int, int]], Pixels]
"""A function that gives memory for a picture of [height, width, channels]."""


def _anywhere(shape: tuple[int, int, int]) -> Pixels:
    return np.empty(shape, np.uint8)


@dataclass(frozen=True, slots=True)
class PictureDecoder:
    """Decodes pictures to the size in which they are stored."""

    size: int | None
    square: bool = True

    def __call__(self, path: Path, room: Room = _anywhere) -> torch.Tensor:
        try:
            with FileIO(path) as file:
                data = file.readall()
        except OSError as error:
            raise _unreadable(str(path), error) from error
        return self.decode(data, str(path), room)

    def decode(self, data: bytes, name: str, room: Room = _anywhere) -> torch.Tensor:
        """Decode the bytes of a file. Errors call the picture `name`."""
        try:
            pixels = self._stored(data, room)
        except LoaderError:
            raise  # there is no room for the pixels, and nothing is wrong with the file
        except Exception as error:  # decoders raise all kinds of errors, even SyntaxError
            raise _unreadable(name, error) from error
        # The result is a view [3, H, W] over memory [H, W, 3], which is channels_last.
        return torch.from_numpy(pixels).permute(2, 0, 1)

    def _stored(self, data: bytes, room: Room) -> Pixels:
        if self.size is None:
            return decode_pixels(data, room=room)
        pixels = decode_pixels(data, at_least=self.size)
        height, width = pixels.shape[:2]
        side = min(height, width)
        if self.square:
            tall = wide = self.size
            box = ((height - side) // 2, (width - side) // 2, side, side)
        else:
            tall, wide = (max(1, round(n * self.size / side)) for n in (height, width))
            box = (0, 0, height, width)
        out = room((tall, wide, 3))
        fit(pixels, box, out)
        return out


def decode_pixels(data: bytes, at_least: int = 0, room: Room | None = None) -> Pixels:
    """The RGB pixels of an encoded picture. If `at_least` is given, it may be decoded smaller, with
    sides of at least so many pixels. PNGs and JPEGs in the printers' CMYK go through Pillow."""
    if simplejpeg.is_jpeg(data):
        height, width, colorspace = _header(data)
        if colorspace not in ("CMYK", "YCCK"):
            smaller: dict[str, Any] = {}
            if at_least and min(height, width) >= 2 * at_least:
                smaller = {"min_height": at_least, "min_width": at_least, "min_factor": 2}
            elif room is not None:
                smaller = {"buffer": room((height, width, 3)).reshape(-1)}
            return simplejpeg.decode_jpeg(data, colorspace="RGB", **smaller)
    with Image.open(BytesIO(data)) as picture:
        return np.array(picture.convert("RGB"))


def _header(jpeg: bytes) -> tuple[int, int, str]:
    height, width, colorspace, *_ = simplejpeg.decode_jpeg_header(jpeg)
    return int(height), int(width), str(colorspace)


def _unreadable(name: str, error: Exception) -> DecodeError:
    return DecodeError(f"cannot decode picture {name}: {error}; repair the file or remove it")
