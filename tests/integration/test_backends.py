"""One suite for every backend: only where decoded samples come from may differ."""

import pickle
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import backend_sources
from support.backend_sources import COUNT, ROUNDING, SIDE, Open, difference, loader, save

from loaders import ReuseLoader
from loaders.backends import BACKENDS
from loaders.errors import DecodeError
from loaders.order.reuse import MODES
from loaders.pixels.augmentation import Flip
from loaders.sources.datasets import PictureFiles

pictures, opened = backend_sources.pictures, backend_sources.opened


@pytest.fixture(params=BACKENDS)
def source(request: pytest.FixtureRequest, opened: Open, pictures: Path) -> Any:
    return opened(request.param, pictures)


@pytest.fixture
def native(opened: Open, pictures: Path) -> Any:
    return opened("native", pictures)


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
        thread.join(60)
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
        assert Path(path).is_file()
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
