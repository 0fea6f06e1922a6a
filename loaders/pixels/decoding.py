"""From a picture file to pixels: this part is deterministic, done once, and kept in a slot.

    read -> decode -> fit to the stored size -> uint8 [3, height, width] over rows of RGB pixels

    stored as    size=None            the picture as it is (sizes vary, so serves must crop)
                 size=256             its central square, fitted to 256 x 256
                 size=256, square=False    its shorter side fitted to 256, its shape kept

A JPEG at least twice as large as it will be stored is decoded at fewer eighths of its size. A
picture is turned upright as its EXIF says, unless `exif` is False (as in torchvision's
`ImageFolder`; Pillow turns a TIFF in any case). Colours that transparency hides are kept; of 16
bits the upper 8 are kept. Pixels stay uint8 until they are on the device.
"""

import logging
import struct
from dataclasses import dataclass, field
from io import BytesIO, FileIO
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from loaders.errors import DecodeError, LoaderError
from loaders.pixels.jpegs import (
    ANYWHERE,
    DecodeCounts,
    Jpeg,
    Pixels,
    Room,
    begins_as_jpeg,
    decodes_jpegs,
    is_jpeg,
)
from loaders.pixels.kernels import fit

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
    """The picture in 8-bit RGB. ValueError: it does not say which number is white."""
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
        pass  # The EXIF is cut off. No viewer turns such a picture.
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


@dataclass(frozen=True, slots=True)
class PictureDecoder:
    """Decodes pictures to the size in which they are stored."""

    size: int | None
    square: bool = True
    exif: bool = True
    """Whether pictures are turned as their EXIF says."""
    pixel_limit: int | None = None
    """Pictures with more pixels are refused. None: Pillow's limit, PIL.Image.MAX_IMAGE_PIXELS."""
    counts: DecodeCounts = field(default_factory=DecodeCounts, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.pixel_limit is not None and self.pixel_limit < 1:
            raise ValueError(f"pixel_limit must be at least 1, not {self.pixel_limit}")

    def __call__(self, path: Path | str, room: Room = ANYWHERE) -> torch.Tensor:
        try:
            with FileIO(path) as file:
                data = file.readall()
        except OSError as error:
            raise unreadable(str(path), error) from error
        return self.decode(data, str(path), room)

    def decode(self, data: bytes, name: str, room: Room = ANYWHERE) -> torch.Tensor:
        """Decode the bytes of a file. Errors call the picture `name`."""
        try:
            pixels = self._decode_to_size(data, room, name)
        except LoaderError:
            raise  # there is no room for the pixels, and nothing is wrong with the file
        except Exception as error:  # decoders raise all kinds of errors, even SyntaxError
            raise unreadable(name, error) from error
        # The result is a view [3, H, W] over memory [H, W, 3], which is channels_last.
        return torch.from_numpy(pixels).permute(2, 0, 1)

    def pixels(
        self, data: bytes, at_least: int = 0, room: Room = ANYWHERE, name: str = "a picture"
    ) -> Pixels:
        """The RGB pixels of an encoded picture, upright. If `at_least` is given, it may be decoded
        smaller, with sides of at least so many pixels. Pillow decodes what is no JPEG, and CMYK."""
        if begins_as_jpeg(data) and decodes_jpegs():
            if not is_jpeg(data):  # its end may be damaged, which a part of it would not show
                room = Room(room.memory)
            with Jpeg(data) as jpeg:
                check_extent(jpeg.height, jpeg.width, self.pixel_limit)
                if not jpeg.printed:
                    turn = jpeg_orientation(data) if self.exif else UPRIGHT
                    eighths, side = 8, min(jpeg.height, jpeg.width)
                    if at_least and side >= 2 * at_least:
                        eighths = 8 * (at_least - 1) // side + 1
                    pixels = jpeg.decode(room if turn == UPRIGHT else ANYWHERE, eighths)
                    self.counts.add("JPEG", native=True)
                    return upright(pixels, turn)
        with Image.open(BytesIO(data)) as picture:
            check_extent(picture.height, picture.width, self.pixel_limit)
            warn_of_frames(picture, name)
            pixels = np.array(as_rgb(picture))
            self.counts.add(picture.format or "unknown format", native=False)
            # Pillow turns a TIFF by itself, and then says that it is upright.
            turn = int(picture.getexif().get(ORIENTATION, UPRIGHT)) if self.exif else UPRIGHT
            return upright(pixels, turn)

    def _decode_to_size(self, data: bytes, room: Room, name: str) -> Pixels:
        if self.size is None:
            return self.pixels(data, room=room, name=name)
        pixels = self.pixels(data, at_least=self.size, name=name)
        height, width = pixels.shape[:2]
        side = min(height, width)
        if self.square:
            tall = wide = self.size
            box = ((height - side) // 2, (width - side) // 2, side, side)
        else:
            tall, wide = (max(1, round(n * self.size / side)) for n in (height, width))
            box = (0, 0, height, width)
        out = room.memory((tall, wide, 3))
        fit(pixels, [box], out[None])
        return out


def check_extent(height: int, width: int, pixel_limit: int | None = None) -> None:
    """Refuse a picture with too many pixels: a small file may decode to gigabytes."""
    name = "PIL.Image.MAX_IMAGE_PIXELS" if pixel_limit is None else "pixel_limit"
    limit = Image.MAX_IMAGE_PIXELS if pixel_limit is None else pixel_limit
    if limit is not None and height * width > limit:
        raise Image.DecompressionBombError(
            f"it has {width} x {height} pixels, more than {name} ({limit}); raise that number if"
            " you trust the file"
        )


def check_encoded(data: bytes, pixel_limit: int | None = None) -> None:
    """`check_extent` for an encoded picture that another library will decode."""
    if is_jpeg(data) and decodes_jpegs():
        with Jpeg(data) as jpeg:
            height, width = jpeg.height, jpeg.width
    else:
        with Image.open(BytesIO(data)) as picture:
            width, height = picture.size
    check_extent(height, width, pixel_limit)


def unreadable(name: str, why: Exception | str) -> DecodeError:
    return DecodeError(f"cannot decode picture {name}: {why}; repair the file or remove it")
