"""From an encoded picture to a square of pixels, compared with Pillow's own reading of it."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from loaders.errors import DecodeError
from loaders.pixels.decoding import PictureDecoder, decode_pixels


def gradient(height: int, width: int) -> NDArray[np.uint8]:
    """Smooth enough that JPEG hardly changes it; every corner has a colour of its own."""
    y, x = np.mgrid[0:height, 0:width]
    red, green = y * 200 // height + 20, x * 200 // width + 20
    return np.stack([red, green, (red + green) // 2], axis=-1).astype(np.uint8)


def encode(picture: Image.Image, kind: str, **options: int) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def as_pillow_reads(data: bytes) -> NDArray[np.int64]:
    with Image.open(io.BytesIO(data)) as picture:
        return np.asarray(picture.convert("RGB")).astype(np.int64)


PICTURE = Image.fromarray(gradient(40, 60))


@pytest.mark.parametrize(
    "data",
    [
        encode(PICTURE, "JPEG", quality=95),
        encode(PICTURE, "JPEG", quality=95, progressive=1),
        encode(PICTURE.convert("L"), "JPEG", quality=95),
        encode(PICTURE.convert("CMYK"), "JPEG", quality=95),
        encode(PICTURE, "PNG"),
        encode(PICTURE.convert("RGBA"), "PNG"),
        encode(PICTURE.convert("L"), "PNG"),
        encode(PICTURE.convert("P"), "PNG"),
        encode(PICTURE.convert("1"), "PNG"),
    ],
    ids=["jpeg", "progressive", "grey", "cmyk", "png", "alpha", "grey png", "palette", "bits"],
)
def test_every_kind_of_picture_becomes_the_rgb_that_pillow_sees(data: bytes) -> None:
    pixels = decode_pixels(data)
    assert pixels.dtype == np.uint8
    assert pixels.shape == (40, 60, 3)
    # Two JPEG decoders round the same cosines differently.
    assert abs(pixels.astype(int) - as_pillow_reads(data)).max() <= 4


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
        encode(PICTURE, "JPEG")[:200],
        encode(PICTURE, "JPEG")[:-20],
        encode(PICTURE, "PNG")[: len(encode(PICTURE, "PNG")) // 2],
    ],
    ids=["empty", "text", "jpeg?", "png?", "jpeg header", "jpeg without end", "half a png"],
)
def test_what_is_no_picture_is_an_error_that_names_the_file(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "broken.jpg"
    path.write_bytes(data)
    with pytest.raises(DecodeError, match=r"cannot decode picture .*broken\.jpg: .*repair"):
        PictureDecoder(8)(path)


def test_a_picture_too_large_to_be_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(DecodeError, match="cannot decode picture"):
        PictureDecoder(8)(stored(tmp_path, gradient(40, 40)))
