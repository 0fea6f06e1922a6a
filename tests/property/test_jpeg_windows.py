"""A window of a JPEG, also of a resized one, has the bits that Pillow gives the whole one there."""

import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms import InterpolationMode, Resize

from loaders import ReuseLoader
from loaders.augment import Chain, Flip, RandomCrop, RandomResizedCrop
from loaders.errors import SampleShapeError
from loaders.pipeline import SlabMaker
from loaders.pixels import resizing
from loaders.pixels.crops import Box, Crops, PicturePart
from loaders.pixels.decoding import PictureDecoder
from loaders.pixels.jpegs import ANYWHERE, Jpeg, Room, decodes_jpegs
from loaders.pixels.resizing import Resizing, resizes

pytestmark = pytest.mark.skipif(not decodes_jpegs(), reason="the kernels were not compiled")

sides = st.integers(1, 120)


@st.composite
def jpegs(draw: st.DrawFn) -> bytes:
    """Noise, since smooth pictures hide a pixel that was computed from the wrong neighbours."""
    height, width, seed = draw(sides), draw(sides), draw(st.integers(0, 1 << 32))
    shape = (height, width, 3)
    noise = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    picture = Image.fromarray(noise)
    if draw(st.booleans()):
        picture = picture.convert("L")
    options: dict[str, Any] = {"quality": draw(st.sampled_from([30, 85, 98]))}
    if picture.mode == "RGB":
        options["subsampling"] = draw(st.sampled_from(["4:4:4", "4:2:2", "4:2:0"]))
    if draw(st.booleans()):
        options["restart_marker_blocks"] = draw(st.integers(1, 5))
    file = io.BytesIO()
    picture.save(file, "JPEG", progressive=draw(st.booleans()), **options)
    return file.getvalue()


def box_within(draw: st.DrawFn, height: int, width: int) -> Box:
    top, left = draw(st.integers(0, height - 1)), draw(st.integers(0, width - 1))
    tall, wide = draw(st.integers(1, height - top)), draw(st.integers(1, width - left))
    return top, left, tall, wide


def showing(box: Box) -> Crops:
    return Crops(lambda *_: [box], [box[2:]])


def in_window(pixels: NDArray[np.uint8], at: PicturePart | None, box: Box) -> NDArray[np.uint8]:
    top, left = (at.top, at.left) if at else (0, 0)
    return pixels[box[0] - top :, box[1] - left :][: box[2], : box[3]]


@given(jpegs(), st.data())
def test_a_window_has_pillows_bits(data: bytes, drawn: st.DataObject) -> None:
    theirs = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    height, width, _ = theirs.shape
    box = drawn.draw(st.composite(box_within)(height, width))
    crops = showing(box)
    with Jpeg(data) as jpeg:
        assert (jpeg.height, jpeg.width) == (height, width)
        ours = jpeg.decode(Room(ANYWHERE.memory, crops))
    assert np.array_equal(in_window(ours, crops.part, box), in_window(theirs, None, box))
    assert len(ours) == box[2]  # no row more than was asked for
    if box == (0, 0, height, width):
        assert crops.part is None


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_picture_is_whole(orientation: int) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    Image.fromarray(noise).save(file, "JPEG", exif=exif)
    room = Room(ANYWHERE.memory, showing((3, 5, 4, 6)))
    seen, whole = (
        PictureDecoder(None).pixels(file.getvalue(), room=room),
        PictureDecoder(None).pixels(file.getvalue()),
    )
    assert seen.shape == whole.shape if orientation > 1 else len(seen) == 4
    assert np.array_equal(seen, whole) or orientation == 1


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("photos")
    for number in range(12):
        shape = (60 + number, 90 - number, 3)
        noise = np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8)
        (root / f"{number % 2}").mkdir(exist_ok=True)
        suffix = "png" if number == 5 else "jpg"
        Image.fromarray(noise).save(root / f"{number % 2}" / f"{number}.{suffix}")
    return root


VIEWS = [Chain([RandomResizedCrop(24), Flip()]), RandomCrop((20, 16))]


@pytest.mark.parametrize("reaugment", [True, False])
@pytest.mark.parametrize("reuse", [1, 3])
@pytest.mark.parametrize("augment", [*VIEWS, VIEWS], ids=["resized", "window", "views"])
def test_batches_are_those_of_whole_pictures(
    photos: Any, reuse: int, augment: Any, reaugment: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = pixels_decoded(monkeypatch)

    def served() -> list[Any]:
        decoded.clear()
        made: list[Any] = []
        with ReuseLoader(
            photos, 4, reuse, reaugment=reaugment, workers=2, seed=3, augment=augment
        ) as loader:
            for _ in range(2):
                made += copies(loader)
            loader.set_reuse(4)  # what was decoded ahead holds too few crops
            made += copies(loader)
            made.append(loader.stats.buffer_bytes)
        return made

    *windows, small = served()
    seen = sum(decoded) / len(decoded)
    monkeypatch.setattr(SlabMaker, "_layout", lambda *_: None)
    *whole, large = served()
    assert len(windows) == len(whole)
    assert all(map(torch.equal, windows, whole))
    assert seen < sum(decoded) / len(decoded)
    assert small < large


@pytest.mark.parametrize("limit", [None, 200_000])
def test_slots_hold_what_is_served_of_large_pictures(photos: Any, limit: int | None) -> None:
    augment, crop = RandomResizedCrop(8), 8 * 8 * 3
    with ReuseLoader(
        photos, 4, 2, buffer_batches=3, workers=1, seed=3, augment=augment, buffer_bytes=limit
    ) as loader:
        assert sum(len(images) for images, _ in loader) == 24
        assert loader.stats.buffer_bytes == 3 * 4 * (2 * crop + 8)  # and the label
        loader.set_reuse(90)  # so many crops are larger than a picture
        next(iter(loader))
        assert loader.stats.buffer_bytes >= (3 * 4 * 60 * 79 * 3 if limit is None else 60 * 79 * 3)


def test_what_a_crop_cannot_be_cut_out_of_is_refused_at_its_serve(photos: Any) -> None:
    with (
        ReuseLoader(photos, 4, 1, workers=1, seed=3, augment=RandomCrop(65)) as loader,
        pytest.raises(SampleShapeError, match="does not hold a window of 65 x 65"),
    ):
        list(loader)


def copies(loader: ReuseLoader) -> list[torch.Tensor]:
    """The pictures of a pass, view by view."""
    batches = [images if isinstance(images, list) else [images] for images, _ in loader]
    return [view.clone() for views in batches for view in views]


def pixels_decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pixels of each JPEG are decoded from now on."""
    decode, counts = Jpeg.decode, list[int]()

    def counted(jpeg: Jpeg, room: Room, eighths: int = 8) -> NDArray[np.uint8]:
        pixels = decode(jpeg, room, eighths)
        counts.append(pixels.size)
        return pixels

    monkeypatch.setattr(Jpeg, "decode", counted)
    return counts


# ---- of a resized picture -----------------------------------------------------------------------

resized = pytest.mark.skipif(not resizes(), reason="Pillow itself resizes here")

larger = st.integers(1, 150)
sizes = st.tuples(larger) | st.tuples(larger, larger)


@resized
@given(larger, larger, sizes, st.booleans(), st.integers(0, 1 << 32), st.data())
def test_a_window_of_a_resized_picture_has_pillows_bits(
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


@resized
@pytest.mark.parametrize("size", [(1,), (3,), (1, 1), (7, 500)])
def test_large_pictures_become_small(size: tuple[int, ...]) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (700, 1100, 3), dtype=np.uint8)
    ours, whole = Resizing(size), (700, 1100)
    tall, wide = ours.sides(*whole)
    out = np.empty((tall, wide, 3), np.uint8)
    ours.resize(noise, (0, 0, *whole), whole, (0, 0, tall, wide), out)
    theirs = Image.fromarray(noise).resize((wide, tall), Image.Resampling.BILINEAR)
    assert np.array_equal(out, np.asarray(theirs))


@resized
@pytest.mark.parametrize("answer", ["nobody has built it", -3, 0])
def test_ours_is_not_trusted_where_it_cannot_or_has_other_bits(
    answer: str | int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(call: object) -> str | int:
        return answer

    library = answer if isinstance(answer, str) else SimpleNamespace(pictures_resize=leave)
    monkeypatch.setattr(resizing, "kernel_library", lambda: library)
    assert not resizes.__wrapped__()
