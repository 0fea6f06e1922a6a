"""Pictures of all modes, depths and orientations become the RGB that a viewer shows, or errors."""

import io
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.transforms.functional import to_tensor

from loaders import LoaderError, ReuseLoader
from loaders.errors import DecodeError
from loaders.pixels import decoding
from loaders.pixels.decoding import PictureDecoder
from loaders.pixels.jpegs import Jpeg

HEIGHT, WIDTH = 40, 60


def gradient(height: int = HEIGHT, width: int = WIDTH) -> NDArray[np.uint8]:
    """Every corner has a colour of its own; smooth enough that JPEG hardly changes it."""
    y, x = np.mgrid[0:height, 0:width]
    red, green = y * 200 // height + 20, x * 200 // width + 20
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


def deep(kind: str) -> bytes:
    return encoded(Image.fromarray(DEEP.astype(np.uint16)), kind)


def raw_ppm(shape: str, samples: NDArray[Any]) -> bytes:
    return f"{shape}\n{WIDTH} {HEIGHT}\n65535\n".encode() + samples.astype(">u2").tobytes()


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
    assert (
        abs(PictureDecoder(None).pixels(data).astype(int) - as_pillow_reads(data)).max() <= rounding
    )


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
    assert np.array_equal(PictureDecoder(None).pixels(data), GREY)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_numbers_without_a_range_are_refused(mode: str) -> None:
    data = encoded(Image.fromarray(DEEP.astype({"I": np.int32, "F": np.float32}[mode])), "TIFF")
    with pytest.raises(DecodeError, match=r"a\.tif: .*nobody knows which one is white.*16 bits"):
        PictureDecoder(None).decode(data, "a.tif")


# ---- which way is up ----------------------------------------------------------------------------


def held(orientation: int, kind: str, **options: Any) -> bytes:
    exif = Image.Exif()
    exif[0x010F] = "a maker"
    exif[decoding.ORIENTATION] = orientation
    return encoded(RGB, kind, exif=exif, **options)


@pytest.mark.parametrize("size", [None, 16])
@pytest.mark.parametrize("kind", ["JPEG", "CMYK JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_turned_as_its_exif_says(
    orientation: int, kind: str, size: int | None
) -> None:
    exif = Image.Exif()
    exif[decoding.ORIENTATION] = orientation
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
    exif[decoding.ORIENTATION] = 6
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
    assert decoding.jpeg_orientation(data) == 6
    assert PictureDecoder(None).pixels(data).shape == (WIDTH, HEIGHT, 3)
    for end in range(200):
        assert decoding.jpeg_orientation(data[:end]) in (1, 6)


def test_an_orientation_that_is_none_is_upright() -> None:
    assert [decoding.jpeg_orientation(held(n, "JPEG")) for n in (0, 9, 1)] == [1, 1, 1]


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
    monkeypatch.setattr(decoding, "_warned_frames", False)
    film = encoded(RGB, "GIF", save_all=True, append_images=[RGB.rotate(180), RGB])
    with caplog.at_level(logging.WARNING):
        first = PictureDecoder(None).decode(film, "film.gif")
        PictureDecoder(None).decode(film, "film.gif")
    assert caplog.text.count("film.gif has 3 frames") == 1
    assert np.array_equal(first.permute(1, 2, 0).numpy(), as_pillow_reads(film))


def stored(tmp_path: Path, pixels: NDArray[np.uint8]) -> Path:
    path = tmp_path / "picture.png"
    Image.fromarray(pixels).save(path)
    return path


def test_a_square_of_the_right_size_is_kept_to_the_byte(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8)
    out = PictureDecoder(24)(stored(tmp_path, pixels))
    assert np.array_equal(out.permute(1, 2, 0).numpy(), pixels)


@pytest.mark.parametrize(
    ("height", "width", "size"),
    [(40, 60, 24), (60, 40, 24), (24, 24, 48), (25, 24, 24), (7, 90, 16), (500, 300, 16)],
)
def test_any_picture_becomes_its_middle_square_in_channels_last(
    height: int, width: int, size: int, tmp_path: Path
) -> None:
    pixels = gradient(height, width)
    out = PictureDecoder(size)(stored(tmp_path, pixels))
    assert out.shape == (3, size, size)
    assert out.dtype == torch.uint8
    assert out.permute(1, 2, 0).is_contiguous(), "channels lie together in memory"
    side = min(height, width)
    # The middle of the picture is the middle of the square, and the edges are the square's edges.
    made = out.numpy().astype(int)
    middle = pixels[height // 2, width // 2].astype(int)
    assert abs(made[:, size // 2, size // 2] - middle).max() <= 200 / size + 3
    first = pixels[(height - side) // 2, (width - side) // 2].astype(int)
    last = pixels[(height + side) // 2 - 1, (width + side) // 2 - 1].astype(int)
    assert abs(made[:, 0, 0] - first).max() <= 200 / size + 3
    assert abs(made[:, -1, -1] - last).max() <= 200 / size + 3


def test_shrinking_averages_instead_of_skipping_pixels(tmp_path: Path) -> None:
    # A fine chequerboard is grey from afar; picking single pixels would leave black and white.
    board = np.indices((64, 64)).sum(axis=0) % 2 * 255
    pixels = np.repeat(board[..., None], 3, axis=-1).astype(np.uint8)
    out = PictureDecoder(8)(stored(tmp_path, pixels)).numpy()
    assert out.min() > 115
    assert out.max() < 140


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no picture",
        b"\xff\xd8\xff\xe0 then nothing",
        b"\x89PNG\r\n",
        encoded(RGB, "JPEG")[:200],
        encoded(RGB, "JPEG")[:-20],
        encoded(RGB, "PNG")[: len(encoded(RGB, "PNG")) // 2],
    ],
    ids=["empty", "text", "jpeg?", "png?", "jpeg header", "jpeg without end", "half a png"],
)
def test_what_is_no_picture_is_an_error_that_names_the_file(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "broken.jpg"
    path.write_bytes(data)
    with pytest.raises(DecodeError, match=r"cannot decode picture .*broken\.jpg: .*repair"):
        PictureDecoder(8)(path)


# ---- in a user's own code -----------------------------------------------------------------------

SMALL = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8))
AS_THEY_ARE = ("RGB", "L", "RGBA", "CMYK", "YCbCr", "HSV", "LAB", "I", "F")
AS_RGB = ("1", "P", "LA", "PA", "I;16")


def in_mode(mode: str) -> Image.Image:
    if mode == "I;16":
        return Image.fromarray(np.full((8, 8), 40_000, np.uint16))
    if mode == "PA":
        return SMALL.convert("P").convert("PA")
    if mode == "LAB":
        return Image.frombytes("LAB", SMALL.size, SMALL.tobytes())
    return SMALL.convert(mode)


class Opened:
    """Sample i is a picture of the i-th mode."""

    def __init__(self, *modes: str) -> None:
        self.pictures = [in_mode(mode) for mode in modes]

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> Image.Image:
        return self.pictures[index].copy()


def seen(source: Any, **options: Any) -> list[Any]:
    """What a collate function is given, pass by pass."""
    with ReuseLoader(
        source, 1, 2, shuffle=False, workers=1, collate=lambda samples: samples[0], **options
    ) as loader:
        return [*loader]


@pytest.mark.parametrize("order", [AS_THEY_ARE[:3], AS_THEY_ARE[2::-1]])
def test_pictures_of_several_modes_come_back_as_they_were(order: tuple[str, ...]) -> None:
    pictures = Opened(*order)
    for mine, theirs in zip(seen(pictures), [*pictures, *pictures], strict=True):
        assert (mine.mode, mine.tobytes()) == (theirs.mode, theirs.tobytes())


@pytest.mark.parametrize("mode", AS_THEY_ARE)
def test_a_picture_of_a_mode_that_is_stored_comes_back_as_it_was(mode: str) -> None:
    assert {(each.mode, each.tobytes()) for each in seen(Opened(mode, mode))} == {
        (mode, in_mode(mode).tobytes())
    }


@pytest.mark.parametrize("mode", AS_RGB)
@pytest.mark.parametrize("before", [(), ("RGB",)])
def test_a_picture_that_cannot_come_back_as_it_was_is_refused(
    mode: str, before: tuple[str, ...]
) -> None:
    with pytest.raises(LoaderError, match=f"mode '{mode}'.*convert"):
        seen(Opened(*before, mode))
    with (
        pytest.raises(LoaderError, match=f"mode '{mode}'.*convert"),
        ReuseLoader(Opened(*before, mode), 1, 1, shuffle=False, workers=1, augment=as_array) as it,
    ):
        list(it)


def as_array(picture: Image.Image) -> Any:
    return np.array(picture)


@pytest.mark.parametrize("mode", AS_RGB)
def test_without_code_that_wants_single_pictures_they_are_batched_as_rgb(mode: str) -> None:
    with ReuseLoader(Opened(mode, "RGB"), 2, 1, workers=1) as loader:
        [batch] = list(loader)
    assert batch.shape == (2, 3, 8, 8)


@pytest.mark.parametrize("mode", ["1", "LA", "P"])
def test_an_adopted_folders_own_transform_sees_no_other_mode_than_torchvision_gives_it(
    mode: str, tmp_path: Any
) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        in_mode(mode).save(tmp_path / name / "a.png")

    with pytest.raises(LoaderError, match=f"mode '{mode}'.*convert"):
        given = ImageFolder(str(tmp_path), transforms.Lambda(to_tensor), loader=Image.open)
        list(ReuseLoader(given, 2, 2, workers=1))
    with ReuseLoader(
        ImageFolder(str(tmp_path), transforms.Lambda(to_tensor)), 2, 1, workers=1
    ) as it:
        [(pictures, _)] = list(it)
    assert (pictures == to_tensor(in_mode(mode).convert("RGB"))).all()
