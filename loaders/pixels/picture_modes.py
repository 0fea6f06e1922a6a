"""What a picture file says of its pixels besides their colours: how deep they are, which way is up.

modes           8-bit RGB of any of Pillow's modes; what has no known range is refused
orientation     1 upright   3 upside down   6, 8 on its side   2, 4, 5, 7 mirrored, too
frames          the first one; that there are more is said once
"""

import logging
import struct

import numpy as np
from numpy.typing import NDArray
from PIL import Image

log = logging.getLogger(__name__)

ORIENTATION = 0x0112
"""The number of the orientation among the tags of EXIF."""
UPRIGHT = 1
BITS_PER_SAMPLE, PHOTOMETRIC = 258, 262
WHITE_IS_ZERO = 0
OF_16_BITS = ("PNG", "PPM")
"""Formats in which Pillow's 32-bit integers come from 16 bits."""
WITH_FRAMES = ("GIF", "WEBP", "TIFF", "PNG", "AVIF")

_warned_frames = False


def as_rgb(picture: Image.Image) -> Image.Image:
    """The picture in 8-bit RGB. ValueError: nobody knows which of its numbers is white."""
    mode = picture.mode
    if mode.startswith("I;16") or (mode == "I" and picture.format in OF_16_BITS):
        bits = _tag(picture, BITS_PER_SAMPLE, 16)
        grey = np.asarray(picture).astype(np.int64)
        if _tag(picture, PHOTOMETRIC, 1) == WHITE_IS_ZERO:  # Pillow knows this of 8 bits alone
            grey = (1 << bits) - 1 - grey
        grey >>= bits - 8
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if mode in ("I", "F"):
        raise ValueError(
            f"its pixels are {'whole numbers' if mode == 'I' else 'fractions'} of 32 bits, and"
            " nobody knows which one is white: save it with 8 or 16 bits"
        )
    if mode in ("La", "RGBa"):  # colours that are multiplied by their transparency
        picture = picture.convert(mode.upper())
    elif mode == "P" and "transparency" in picture.info:
        picture = picture.convert("RGBA")
    return picture.convert("RGB")


def _tag(picture: Image.Image, tag: int, default: int) -> int:
    """What a TIFF says of its pixels."""
    given = getattr(picture, "tag_v2", {}).get(tag, default)
    return int(given[0] if isinstance(given, tuple) else given)


def upright(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Rows of pixels, turned as the orientation asks for."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


def jpeg_orientation(jpeg: bytes) -> int:
    """What the EXIF of a JPEG says; 1 where it says nothing that can be understood."""
    at = 2
    while at + 4 <= len(jpeg) and jpeg[at] == 0xFF:
        marker, size = jpeg[at + 1], int.from_bytes(jpeg[at + 2 : at + 4], "big")
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        if marker == 0xDA:  # pixels begin
            break
        if marker == 0xE1 and jpeg[at + 4 : at + 10] == b"Exif\0\0":
            return _exif_orientation(jpeg[at + 10 : at + 2 + size])
        at += 2 + size
    return UPRIGHT


def _exif_orientation(exif: bytes) -> int:
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None:
        return UPRIGHT
    try:
        (first,) = struct.unpack_from(f"{order}I", exif, 4)
        (entries,) = struct.unpack_from(f"{order}H", exif, first)
        for number in range(entries):
            tag, kind, _, value = struct.unpack_from(f"{order}HHIH", exif, first + 2 + 12 * number)
            if tag == ORIENTATION and kind == 3 and 1 <= value <= 8:
                return int(value)
    except struct.error:
        pass  # What is cut off names no orientation, and no viewer turns such a picture.
    return UPRIGHT


def warn_of_frames(picture: Image.Image, name: str) -> None:
    global _warned_frames
    if _warned_frames or picture.format not in WITH_FRAMES:
        return
    frames = getattr(picture, "n_frames", 1)
    if frames > 1:
        _warned_frames = True
        log.warning(
            "%s has %d frames; of such pictures the first frame is read, and the others are not",
            name,
            frames,
        )
