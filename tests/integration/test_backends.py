"""One suite for every backend: only where decoded samples come from may differ."""

import io
import os
import pickle
import tarfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from loaders import ReuseLoader
from loaders.backends import BACKENDS, open_source
from loaders.errors import BackendMissing, DecodeError
from loaders.order.reuse import MODES
from loaders.pixels.augmentation import Flip
from loaders.sources.datasets import PictureFiles, picture_folder

SIDE = 32
SAMPLES = {"ant": 9, "bee": 8, "cat": 5}
COUNT = sum(SAMPLES.values())
ROUNDING = 2.0
"""Levels, on average: FFCV decodes with a faster and coarser cosine transform than the others."""


def need(backend: str) -> None:
    """Skip the test where the package is missing, and say how to get it."""
    try:
        if backend == "dali":
            from loaders.backends.dali import import_dali

            import_dali()
        if backend == "ffcv":
            from loaders.backends.ffcv import import_ffcv

            import_ffcv()
    except BackendMissing as error:
        pytest.skip(str(error))


def portrait(number: int, height: int = SIDE, width: int = SIDE) -> NDArray[np.uint8]:
    """Smooth, as photos are, and unlike every other number's."""
    y, x = np.mgrid[0:height, 0:width] / max(height, width)
    tint = np.random.default_rng(number).uniform(30, 220, 3)
    return np.clip(tint + 40 * np.stack([y, x, x - y], axis=-1), 0, 255).astype(np.uint8)


def save(path: Path, number: int, height: int = SIDE, width: int = SIDE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(portrait(number, height, width)).save(path, quality=92)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, number = tmp_path_factory.mktemp("pictures"), 0
    for name, count in SAMPLES.items():
        for _ in range(count):
            save(root / name / f"{number:03}.jpg", number)
            number += 1
    return root


Open = Callable[[str, Path], Any]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """`opened(backend, folder)` opens the pictures of `folder`; closed after the test."""
    sources: list[Any] = []

    def open_(backend: str, folder: Path) -> Any:
        need(backend)
        if backend == "ffcv":
            sources.append(open_source(beton_of(folder, tmp_path / "pictures.beton"), "ffcv"))
        else:
            sources.append(open_source(picture_folder(folder, SIDE), backend))
        return sources[-1]

    yield open_
    for source in sources:
        getattr(source, "close", lambda: None)()


def beton_of(folder: Path, out: Path, mode: Any = "jpg") -> Path:
    from loaders.backends.beton import Encoding, convert

    files = picture_folder(folder, SIDE)
    convert(files, out, Encoding(mode, quality=100), workers=2)
    return out


@pytest.fixture(params=BACKENDS)
def source(request: pytest.FixtureRequest, opened: Open, pictures: Path) -> Any:
    return opened(request.param, pictures)


@pytest.fixture
def native(opened: Open, pictures: Path) -> Any:
    return opened("native", pictures)


def loader(source: Any, **changes: Any) -> ReuseLoader:
    usual = {"batch_size": 4, "reuse": 3, "buffer_batches": 2, "workers": 2, "seed": 3}
    return ReuseLoader(source, **{**usual, **changes})


Batch = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], bytes]


def watch(loader: ReuseLoader) -> Iterator[Batch]:
    """(ids, serves, labels, pixels) of every batch of a pass."""
    for pixels, labels in loader:
        info = loader.last_batch
        assert info is not None
        yield (
            tuple(info.ids.tolist()),
            tuple(info.serves.tolist()),
            tuple(labels.tolist()),
            pixels.numpy().tobytes(),
        )


def served(batches: list[Batch]) -> Counter[int]:
    return Counter(sample_id for ids, _, _, _ in batches for sample_id in ids)


# ---- the laws -----------------------------------------------------------------------------------


def test_without_reuse_every_sample_is_served_once_a_pass(source: Any) -> None:
    assert served([*watch(loader(source, reuse=1))]) == Counter(range(COUNT))


@pytest.mark.parametrize("mode", MODES)
def test_with_reuse_every_sample_is_served_exactly_so_often(source: Any, mode: str) -> None:
    made = loader(source, mode=mode)
    assert served([*watch(made)]) == Counter(dict.fromkeys(range(COUNT), 3))
    assert made.stats.decoded == COUNT
    assert made.stats.reused == 2 * COUNT


def test_a_sample_is_the_picture_and_the_label_that_the_native_decoder_gives(
    source: Any, native: Any
) -> None:
    assert len(source) == len(native) == COUNT
    for i in range(COUNT):
        (picture, label), (expected, expected_label) = source[i], native[i]
        assert picture.dtype == torch.uint8
        assert picture.shape == (3, SIDE, SIDE)
        assert picture.permute(1, 2, 0).is_contiguous(), "channels lie together in memory"
        assert type(label) is int
        assert label == expected_label
        assert difference(picture, expected) < ROUNDING
        assert difference(picture, native[(i + 1) % COUNT][0]) > 2 * ROUNDING


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a.float() - b.float()).abs().mean().item()


def test_the_loader_serves_each_label_with_its_own_picture(source: Any, native: Any) -> None:
    made = loader(source)
    for pixels, labels in made:
        info = made.last_batch
        assert info is not None
        for picture, label, sample_id in zip(pixels, labels, info.ids, strict=True):
            expected, expected_label = native[sample_id]
            assert label == expected_label
            assert difference(picture, expected) < ROUNDING


@pytest.mark.parametrize("mode", MODES)
def test_order_and_counters_are_those_of_the_native_backend(
    source: Any, native: Any, mode: str
) -> None:
    mine, theirs = loader(source, mode=mode), loader(native, mode=mode)
    for _ in range(2):
        assert [b[:3] for b in watch(mine)] == [b[:3] for b in watch(theirs)]
    for counter in ("decoded", "extra_decodes", "served", "reused", "buffer_bytes"):
        assert mine.stats[counter] == theirs.stats[counter]


@pytest.mark.parametrize("batches", [1, 6, 11, 16])
def test_a_resumed_loader_goes_on_with_the_same_batches(source: Any, batches: int) -> None:
    whole = [*watch(loader(source, augment=Flip()))]
    first = loader(source, augment=Flip())
    for number, _ in enumerate(watch(first), 1):
        if number == batches:
            break
    second = loader(source, augment=Flip())
    second.load_state_dict(first.state_dict())
    assert [*watch(second)] == whole[batches:]


def test_the_number_of_workers_does_not_matter(source: Any) -> None:
    one, three = (loader(source, workers=w, augment=Flip()) for w in (1, 3))
    assert [*watch(one)] == [*watch(three)]


def test_a_second_pass_has_the_same_samples_in_another_order(source: Any) -> None:
    made = loader(source, reuse=2)
    first, second = [*watch(made)], [*watch(made)]
    assert served(first) == served(second)
    assert [b[0] for b in first] != [b[0] for b in second]


def test_several_samples_at_once_are_those_samples_in_that_order(source: Any) -> None:
    ids = [7, 0, COUNT - 1, 7, *range(COUNT), *range(COUNT)]
    fetch = getattr(source, "__getitems__", lambda ids: [source[i] for i in ids])
    together = fetch(ids)
    assert len(together) == len(ids)
    for i, (picture, label) in zip(ids, together, strict=True):
        assert torch.equal(picture, source[i][0])
        assert label == source[i][1]


def test_many_threads_may_ask_at_once(source: Any) -> None:
    expected = [source[i][0] for i in range(COUNT)]
    wrong: list[int] = []

    def ask(start: int) -> None:
        for i in (*range(start, COUNT), *range(start)):
            if not torch.equal(source[i][0], expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=ask, args=(4 * n,)) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong


def test_a_sample_stays_what_it_was_when_others_are_decoded(source: Any) -> None:
    picture = source[0][0]
    before = picture.clone()
    for i in range(1, COUNT):
        source[i]
    assert torch.equal(picture, before)


def test_a_source_can_be_sent_to_another_process(source: Any) -> None:
    copy = pickle.loads(pickle.dumps(source))
    assert torch.equal(copy[3][0], source[3][0])


def test_a_source_tells_its_files_and_labels_as_torchvisions_folders_do(source: Any) -> None:
    if isinstance(source, PictureFiles):
        pytest.skip("known by its paths")
    assert len(source.samples) == COUNT
    for i, (path, label) in enumerate(source.samples):
        assert path.is_file()
        assert label == source.labels[i] == source[i][1]


# ---- what goes wrong ----------------------------------------------------------------------------

BAD = 13


def spoil(source: Any) -> str:
    """Damage sample BAD; what an error must name."""
    if hasattr(source, "files"):
        source = source.files
    if isinstance(source, PictureFiles):
        path = Path(source.paths[BAD])
        path.write_bytes(path.read_bytes()[:-30])
        return str(path)
    at = source._index
    start, size = int(at.starts[BAD]), int(at.sizes[BAD])
    with source.path.open("r+b") as file:
        file.seek(start + size - 30)
        file.write(bytes(30))
    return f"sample {BAD} of {source.path}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_damaged_picture_is_named_with_the_reason_and_the_others_stay_readable(
    backend: str, opened: Open, tmp_path: Path
) -> None:
    for number in range(16):
        save(tmp_path / "p" / ("cat" if number < 8 else "dog") / f"{number:02}.jpg", number)
    source = opened(backend, tmp_path / "p")
    good = [source[i][0] for i in range(16)]
    culprit = spoil(source)
    with pytest.raises(DecodeError) as error:
        list(loader(source, shuffle=False))
    assert culprit in str(error.value)
    assert "Premature end" in str(error.value) or "truncated" in str(error.value)
    assert error.value.__notes__ == [f"while decoding sample {BAD} of pass 0"]
    for i in {*range(16)} - {BAD}:
        assert torch.equal(source[i][0], good[i])
    with pytest.raises(DecodeError, match=str(BAD)):
        source[BAD]


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:120]),
        lambda path: path.write_text("I am no picture\n" * 20),
        lambda path: path.unlink(),
        lambda path: (path.unlink(), path.mkdir()),
    ],
    ids=["empty", "cut", "text", "removed", "folder"],
)
def test_dali_names_the_one_bad_file_among_many_good_ones(
    damage: Callable[[Path], object], opened: Open, tmp_path: Path
) -> None:
    for number in range(12):
        save(tmp_path / "p" / ("cat" if number < 6 else "dog") / f"{number:02}.jpg", number)
    source = opened("dali", tmp_path / "p")
    bad = source.files.paths[7]
    damage(bad)
    with pytest.raises(DecodeError) as error:
        source.__getitems__(range(12))
    assert str(error.value).startswith(f"cannot decode picture {bad}: ")
    assert "repair the file or remove it" in str(error.value)
    assert "nvImageCodec" not in str(error.value), "a number is no reason"
    assert len(source.__getitems__([0, 1, 11])) == 3


def test_closing_twice_is_closing_once(source: Any) -> None:
    if not hasattr(source, "close"):
        pytest.skip("the native source holds nothing")
    source[0]
    source.close()
    source.close()


def test_dali_keeps_a_pipeline_a_worker_and_closing_ends_their_threads(
    opened: Open, pictures: Path
) -> None:
    source = opened("dali", pictures)
    list(loader(source, workers=2))
    assert 1 <= len(source._idle) <= 2
    running = threads_of_this_process()
    source.close()
    assert threads_of_this_process() < running


def threads_of_this_process() -> int:
    return len(os.listdir("/proc/self/task"))


def test_dali_decodes_a_tar_as_it_decodes_the_folder_that_is_in_it(
    opened: Open, pictures: Path, tmp_path: Path
) -> None:
    folder = opened("dali", pictures)
    with tarfile.open(tmp_path / "p.tar", "w") as tar:
        tar.add(pictures, arcname=".")
    source = open_source(tmp_path / "p.tar", "dali", size=SIDE)
    assert list(source.labels) == list(folder.labels)
    assert source.classes == folder.classes
    for (mine, _), (other, _) in zip(
        source.__getitems__(range(COUNT)), folder.__getitems__(range(COUNT)), strict=True
    ):
        assert torch.equal(mine, other)
    member = source.files.members[BAD]
    with (tmp_path / "p.tar").open("r+b") as file:
        file.seek(member.offset + member.size - 30)
        file.write(bytes(30))
    with pytest.raises(DecodeError, match=rf"p\.tar:.*{Path(member.name).name}"):
        source.__getitems__(range(COUNT))
    assert torch.equal(source[0][0], folder[0][0])


# ---- DALI decodes what the native decoder decodes -----------------------------------------------


def encode(picture: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def test_dali_sees_the_same_pixels_in_every_kind_of_picture(opened: Open, tmp_path: Path) -> None:
    picture, turned = Image.fromarray(portrait(1)), Image.Exif()
    turned[0x0112] = 6  # a camera that was held upright: nobody here turns the picture
    kinds = {
        "a.jpg": encode(picture, "JPEG"),
        "b.jpg": encode(picture, "JPEG", progressive=1),
        "c.jpg": encode(picture, "JPEG", subsampling=0),
        "d.jpg": encode(picture.convert("L"), "JPEG"),
        "e.jpg": encode(picture.convert("CMYK"), "JPEG"),
        "f.jpg": encode(picture, "JPEG", exif=turned),
        "g.png": encode(picture, "PNG"),
        "h.png": encode(picture.convert("RGBA"), "PNG"),
        "i.png": encode(picture.convert("L"), "PNG"),
        "j.png": encode(picture.convert("P"), "PNG"),
        "k.png": encode(picture.convert("1"), "PNG"),
    }
    for name, data in kinds.items():
        (tmp_path / "p" / name[0]).mkdir(parents=True)
        (tmp_path / "p" / name[0] / name).write_bytes(data)
    source = opened("dali", tmp_path / "p")
    for i in range(len(kinds)):
        assert torch.equal(source[i][0], source.files[i][0]), source.files.paths[i]


@pytest.mark.parametrize(("height", "width"), [(40, 60), (90, 33), (32, 31), (20, 20)])
def test_dali_resizes_to_the_same_middle_square(
    height: int, width: int, opened: Open, tmp_path: Path
) -> None:
    save(tmp_path / "p" / "a" / "0.jpg", 1, height, width)
    save(tmp_path / "p" / "b" / "1.jpg", 2, width, height)
    source = opened("dali", tmp_path / "p")
    for i in range(2):
        assert source[i][0].shape == (3, SIDE, SIDE)
        assert difference(source[i][0], source.files[i][0]) < 0.7


@pytest.mark.gpu
@pytest.mark.parametrize("size", [SIDE, 224])
def test_dali_decodes_on_a_gpu_what_it_decodes_on_the_cpu(size: int, tmp_path: Path) -> None:
    need("dali")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    from loaders.backends.dali import DaliPictures

    for number in range(6):
        save(tmp_path / "p" / ("a" if number < 3 else "b") / f"{number}.jpg", number, 240, 300)
    files = picture_folder(tmp_path / "p", size)
    source = DaliPictures(files, device_id=0)
    for batch in (range(6), [0], [5, 1, 3]):
        for i, (picture, label) in zip(batch, source.__getitems__(batch), strict=True):
            assert picture.device.type == "cpu"
            assert difference(picture, files[i][0]) < ROUNDING
            assert label == files[i][1]
    files.paths[4].write_bytes(files.paths[4].read_bytes()[:-400])
    with pytest.raises(DecodeError, match=files.paths[4].name):
        source.__getitems__(range(6))
    assert difference(source[5][0], files[5][0]) < ROUNDING
    source.close()
