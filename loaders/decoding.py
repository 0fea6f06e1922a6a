"""From a picture file to pixels: the deterministic part, done once and kept in a slot.

    read -> decode -> resize the short side -> centre crop -> uint8 [3, size, size]

Everything random comes later, at every serve (`augment`). Pixels stay uint8 until the device: a
float32 batch costs the host as much as decoding did.
"""

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray
from PIL import Image

from loaders.errors import DecodeError


@dataclass(frozen=True, slots=True)
class PictureDecoder:
    """Decodes one file to a square of `size` pixels."""

    size: int

    def __call__(self, path: Path) -> torch.Tensor:
        try:
            pixels = decode_pixels(path.read_bytes())
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise DecodeError(
                f"cannot decode picture {path}: {error}; repair the file or remove it"
            ) from error
        # The view is [3, H, W] over [H, W, 3] memory: channels_last, which convolutions like.
        return torch.from_numpy(self._square(pixels)).permute(2, 0, 1)

    def _square(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        height, width = pixels.shape[:2]
        if height == width == self.size:
            return pixels
        side = min(height, width)
        left, top = (width - side) / 2, (height - side) / 2
        square = Image.fromarray(pixels).resize(
            (self.size, self.size),
            Image.Resampling.BILINEAR,
            box=(left, top, left + side, top + side),
            # Halve by plain averaging while the picture is over 3x too large: same look, cheaper.
            reducing_gap=3.0,
        )
        return np.array(square)


def decode_pixels(data: bytes) -> NDArray[np.uint8]:
    """RGB pixels of an encoded picture. JPEGs in the printers' CMYK, and PNGs, go through
    Pillow."""
    if simplejpeg.is_jpeg(data):
        colorspace = simplejpeg.decode_jpeg_header(data)[2]
        if colorspace not in ("CMYK", "YCCK"):
            return simplejpeg.decode_jpeg(data, colorspace="RGB")
    with Image.open(io.BytesIO(data)) as picture:
        return np.array(picture.convert("RGB"))
