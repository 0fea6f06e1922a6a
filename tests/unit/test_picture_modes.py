"""Pictures of all modes, depths and orientations become the RGB that a viewer shows, or errors."""

import io
import logging
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps

from loaders.errors import DecodeError
from loaders.pixels import picture_modes
from loaders.pixels.decoding import PictureDecoder, decode_pixels
from loaders.pixels.jpegs import Jpeg

HEIGHT, WIDTH = 40, 60


def gradient() -> NDArray[np.uint8]:
    """Every corner has a colour of its own."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    red, green = y * 200 // HEIGHT + 20, x * 200 // WIDTH + 20
    return np.stack([red, green, (red + green) // 2], axis=-1).astype(np.uint8)


RGB = Image.fromarray(gradient())
ALPHA = Image.fromarray((np.arange(HEIGHT * WIDTH) % 256).astype(np.uint8).reshape(HEIGHT, WIDTH))
DEEP = (np.arange(HEIGHT * WIDTH, dtype=np.uint32) * 65535 // (HEIGHT * WIDTH)).reshape(
    HEIGHT, WIDTH
)


def encoded(picture: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def with_alpha(mode: str) -> Image.Image:
    picture = RGB.convert(mode)
    picture.putalpha(ALPHA)
    return picture


def see_through(kind: str = "PNG") -> bytes:
    return encoded(RGB.convert("P"), kind, transparency=bytes(range(256)))


def deep(kind: str) -> bytes:
    return encoded(Image.fromarray(DEEP.astype(np.uint16)), kind)


def raw_ppm(shape: str, samples: NDArray[Any]) -> bytes:
    return f"{shape}\n{WIDTH} {HEIGHT}\n65535\n".encode() + samples.astype(">u2").tobytes()


DEEP_RGB = np.stack([DEEP, DEEP[::-1], DEEP[:, ::-1]], axis=-1)
GREY = np.repeat((DEEP >> 8)[..., None], 3, axis=-1)


def as_pillow_reads(data: bytes) -> NDArray[Any]:
    with Image.open(io.BytesIO(data)) as picture:
        return np.asarray(picture.convert("RGBA").convert("RGB"))


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", "GIF", "BMP", "JPEG"])
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"])
def test_every_mode_in_every_format_is_what_pillow_makes_of_it(kind: str, mode: str) -> None:
    picture = with_alpha(mode[:-1]) if mode in ("LA", "RGBA") else RGB.convert(mode)
    try:
        options = {"lossless": True} if kind == "WEBP" else {}
        data = encoded(picture, kind, **options)
    except (OSError, ValueError):
        pytest.skip(f"no {kind} is {mode}")
    rounding = 4 if kind == "JPEG" else 0
    assert abs(decode_pixels(data).astype(int) - as_pillow_reads(data)).max() <= rounding


def test_what_transparency_hides_keeps_its_colours() -> None:
    for data in (see_through(), encoded(with_alpha("RGB"), "PNG")):
        expected = as_pillow_reads(data)
        assert np.array_equal(decode_pixels(data), expected)
        assert expected.std() > 20


@pytest.mark.parametrize(
    "data",
    [
        deep("PNG"),
        deep("TIFF"),
        encoded(Image.fromarray(DEEP.astype(">u2")), "TIFF"),
        encoded(Image.fromarray((65535 - DEEP).astype(np.uint16)), "TIFF", tiffinfo={262: 0}),
        raw_ppm("P5", DEEP),
    ],
    ids=["png", "tiff", "big-endian tiff", "tiff whose white is 0", "pgm"],
)
def test_16_bits_of_grey_become_their_upper_8(data: bytes) -> None:
    assert np.array_equal(decode_pixels(data), GREY)


def test_16_bits_of_colour_become_8_too() -> None:
    pixels = decode_pixels(raw_ppm("P6", DEEP_RGB)).astype(int)
    assert abs(pixels - (DEEP_RGB >> 8)).max() <= 1


@pytest.mark.parametrize("mode", ["I", "F"])
def test_numbers_without_a_range_are_refused(mode: str) -> None:
    data = encoded(Image.fromarray(DEEP.astype({"I": np.int32, "F": np.float32}[mode])), "TIFF")
    with pytest.raises(DecodeError, match=r"a\.tif: .*nobody knows which one is white.*16 bits"):
        PictureDecoder(None).decode(data, "a.tif")


# ---- which way is up ----------------------------------------------------------------------------


def held(orientation: int, kind: str, **options: Any) -> bytes:
    exif = Image.Exif()
    exif[0x010F] = "a maker"
    exif[picture_modes.ORIENTATION] = orientation
    return encoded(RGB, kind, exif=exif, **options)


@pytest.mark.parametrize("size", [None, 16])
@pytest.mark.parametrize("kind", ["JPEG", "CMYK JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_turned_as_its_exif_says(
    orientation: int, kind: str, size: int | None
) -> None:
    exif = Image.Exif()
    exif[picture_modes.ORIENTATION] = orientation
    picture = RGB.convert("CMYK") if kind == "CMYK JPEG" else RGB
    data = encoded(picture, kind.split()[-1], exif=exif, quality=95)
    with Image.open(io.BytesIO(data)) as opened:
        shown = np.asarray(ImageOps.exif_transpose(opened).convert("RGB"))
    assert shown.shape[:2] == ((HEIGHT, WIDTH) if orientation < 5 else (WIDTH, HEIGHT))
    made = PictureDecoder(size, square=False).decode(data, "a").permute(1, 2, 0).numpy()
    plain = PictureDecoder(size, square=False).decode(encoded(Image.fromarray(shown), "PNG"), "a")
    assert made.shape == (expected := plain.permute(1, 2, 0).numpy()).shape
    assert abs(made.astype(int) - expected).max() <= (4 if size is None else 12)


@pytest.mark.parametrize("size", [None, 16])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_picture_stays_as_it_lies_in_the_file_where_its_exif_is_not_asked(
    kind: str, size: int | None
) -> None:
    exif = Image.Exif()
    exif[picture_modes.ORIENTATION] = 6
    decoder = PictureDecoder(size, square=False, exif=False)
    made = decoder.decode(encoded(RGB, kind, exif=exif, quality=95), "a")
    assert torch.equal(made, decoder.decode(encoded(RGB, kind, quality=95), "a"))
    assert made.shape[1] < made.shape[2]


@pytest.mark.parametrize("order", ["II", "MM"])
def test_the_exif_of_a_jpeg_is_read_in_both_byte_orders_and_survives_any_cut(order: str) -> None:
    data = held(6, "JPEG")
    if order == "MM":
        exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
        plain = encoded(RGB, "JPEG")
        data = plain[:2] + b"\xff\xe1" + (len(exif) + 2).to_bytes(2, "big") + exif + plain[2:]
    assert picture_modes.jpeg_orientation(data) == 6
    assert decode_pixels(data).shape == (WIDTH, HEIGHT, 3)
    for end in range(200):
        assert picture_modes.jpeg_orientation(data[:end]) in (1, 6)


def test_an_orientation_that_is_none_is_upright() -> None:
    assert [picture_modes.jpeg_orientation(held(n, "JPEG")) for n in (0, 9, 1)] == [1, 1, 1]


# ---- too large, and too many --------------------------------------------------------------------


@pytest.mark.parametrize("size", [None, 8])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"])
def test_a_picture_of_more_pixels_than_pillow_trusts_is_refused_before_it_is_decoded(
    kind: str, size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encoded(RGB, kind)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", HEIGHT * WIDTH)
    assert PictureDecoder(size).decode(data, "a").ndim == 3
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", HEIGHT * WIDTH // 3)
    with pytest.raises(DecodeError, match=r"cannot decode picture a: .*MAX_IMAGE_PIXELS|bomb"):
        PictureDecoder(size).decode(data, "a")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert PictureDecoder(size).decode(data, "a").ndim == 3


@pytest.mark.parametrize("size", [None, 8])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"])
def test_a_limit_of_ones_own_takes_the_place_of_pillows(
    kind: str, size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, pixels = encoded(RGB, kind), HEIGHT * WIDTH
    assert PictureDecoder(size, pixel_limit=pixels).decode(data, "a").ndim == 3
    with pytest.raises(DecodeError, match=rf"more than pixel_limit \({pixels - 1}\)"):
        PictureDecoder(size, pixel_limit=pixels - 1).decode(data, "a")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", pixels // 3)
    larger = PictureDecoder(size, pixel_limit=pixels)
    if kind == "JPEG":
        assert larger.decode(data, "a").ndim == 3
    else:  # Pillow, which reads it, has no limit for a single picture
        with pytest.raises(DecodeError, match="bomb"):
            larger.decode(data, "a")


def test_a_limit_that_no_picture_meets_is_refused() -> None:
    with pytest.raises(ValueError, match="pixel_limit must be at least 1, not 0"):
        PictureDecoder(None, pixel_limit=0)


def test_a_jpeg_that_says_it_is_huge_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray(encoded(RGB, "JPEG"))
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = (20_000).to_bytes(2, "big") * 2
    decoded = []
    monkeypatch.setattr(Jpeg, "decode", lambda *a, **k: decoded.append(a))
    with pytest.raises(DecodeError, match=r"a\.jpg: it has 20000 x 20000 pixels, more than"):
        PictureDecoder(None).decode(bytes(data), "a.jpg")
    assert decoded == []


def test_that_frames_are_left_out_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picture_modes, "_warned_frames", False)
    film = encoded(RGB, "GIF", save_all=True, append_images=[RGB.rotate(180), RGB])
    with caplog.at_level(logging.WARNING):
        first = PictureDecoder(None).decode(film, "film.gif")
        PictureDecoder(None).decode(film, "film.gif")
    assert caplog.text.count("film.gif has 3 frames") == 1
    assert np.array_equal(first.permute(1, 2, 0).numpy(), as_pillow_reads(film))
