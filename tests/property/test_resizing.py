"""A window of a resized picture has the bits that Pillow gives the whole one there."""

import io
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import InterpolationMode, Resize

from loaders.pixels import resizing
from loaders.pixels.crops import Box, Crops
from loaders.pixels.jpegs import ANYWHERE, Jpeg, Room
from loaders.pixels.resizing import Resizing, resizes

pytestmark = pytest.mark.skipif(not resizes(), reason="Pillow itself resizes here")

sides = st.integers(1, 150)
sizes = st.tuples(sides) | st.tuples(sides, sides)


@given(sides, sides, sizes, st.booleans(), st.integers(0, 1 << 32), st.data())
def test_a_window_has_pillows_bits(
    height: int, width: int, size: tuple[int, ...], cubic: bool, seed: int, drawn: st.DataObject
) -> None:
    ours = Resizing(size, cubic)
    assume(ours.begins_with_columns(height, width) and max(ours.sides(height, width)) < 2000)
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "JPEG", quality=98)
    how = InterpolationMode.BICUBIC if cubic else InterpolationMode.BILINEAR
    theirs = np.asarray(Resize(list(size), how)(Image.open(file)))
    tall, wide = theirs.shape[:2]
    assert ours.sides(height, width) == (tall, wide)
    top, left = drawn.draw(st.integers(0, tall - 1)), drawn.draw(st.integers(0, wide - 1))
    rows, columns = drawn.draw(st.integers(1, tall - top)), drawn.draw(st.integers(1, wide - left))
    box = top, left, rows, columns
    crops = Crops(lambda *_: [box], [(rows, columns)])
    with Jpeg(file.getvalue()) as jpeg:
        pixels = ours.decoded(jpeg, Room(ANYWHERE.memory, crops))
    assert np.array_equal(pixels, theirs[top:, left:][:rows, :columns])
    if box != (0, 0, tall, wide):
        assert crops.part is not None
        assert (crops.part.top, crops.part.left) == (top, left)
        assert (crops.part.height, crops.part.width) == (tall, wide)


@pytest.mark.parametrize("size", [(1,), (3,), (1, 1), (7, 500)])
def test_large_pictures_become_small(size: tuple[int, ...]) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (700, 1100, 3), dtype=np.uint8)
    ours, whole = Resizing(size), (700, 1100)
    tall, wide = ours.sides(*whole)
    out = np.empty((tall, wide, 3), np.uint8)
    ours.resize(noise, (0, 0, *whole), whole, (0, 0, tall, wide), out)
    theirs = Image.fromarray(noise).resize((wide, tall), Image.Resampling.BILINEAR)
    assert np.array_equal(out, np.asarray(theirs))


@pytest.mark.parametrize(
    ("part", "window"),
    [
        ((0, 0, 20, 30), (5, 0, 10, 10)),
        ((0, 0, 40, 40), (-1, 0, 10, 10)),
        ((0, 0, 40, 40), (0, 11, 10, 10)),
    ],
)
def test_a_window_that_the_part_does_not_make_is_refused(part: Box, window: Box) -> None:
    pixels, out = np.zeros((*part[2:], 3), np.uint8), np.empty((10, 10, 3), np.uint8)
    with pytest.raises(ValueError, match=r"window \(.* 10, 10\) .* needs more than"):
        Resizing((20, 20)).resize(pixels, part, (40, 40), window, out)


@pytest.mark.parametrize("answer", ["nobody has built it", -3, 0])
def test_ours_is_not_trusted_where_it_cannot_or_has_other_bits(
    answer: str | int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(call: object) -> str | int:
        return answer

    library = answer if isinstance(answer, str) else SimpleNamespace(pictures_resize=leave)
    monkeypatch.setattr(resizing, "kernel_library", lambda: library)
    assert not resizes.__wrapped__()
