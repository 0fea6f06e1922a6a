"""Samples that cannot be read, through the loader: every damage x what to do x who reads."""

import io
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support import loader_datasets as sets

from loaders import ReuseLoader, Workers
from loaders.errors import DecodeError, FrozenDraw, LoaderError
from loaders.order.keyed_permutation import source_order
from loaders.pixels.augmentation import Augmentation, Chain, Flip, PadCrop
from loaders.slots.leaves import Chunk
from loaders.sources.datasets import picture_folder
from loaders.workers.decode_work import PassOrder
from loaders.workers.reader import SkippedSamples

BATCH = 4
AUGMENT = Chain([PadCrop(2), Flip()])


def png(break_at: int, by: int) -> bytes:
    """A PNG that ends there, or of which a byte is another one there."""
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    memory = io.BytesIO()
    Image.fromarray(pixels).save(memory, "png")
    data = bytearray(memory.getvalue())
    if not by:
        return bytes(data[:break_at])
    data[break_at] ^= by
    return bytes(data)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[:-150],
    "empty": lambda data: b"",
    "the head alone": lambda data: data[:40],
    "words": lambda data: b"I am no picture\n" * 30,
    "zeros within": lambda data: data[:20] + bytes(200) + data[220:],
    "a PNG that is cut": lambda data: png(-30, 0),
    "a chunk where there is none, of which Pillow raises a SyntaxError": lambda data: png(35, 1),
}


def damage(path: Path, how: str) -> None:
    if how in DAMAGES:
        path.write_bytes(DAMAGES[how](path.read_bytes()))
    else:
        path.unlink()
    if how == "a folder":
        path.mkdir()


ONCE_OR_AUGMENT = [{"once": AUGMENT}, {"augment": AUGMENT}]


@pytest.mark.parametrize("changes", ONCE_OR_AUGMENT, ids=["once", "augment"])
@pytest.mark.parametrize("worker_kind", ["thread", "process"])
@pytest.mark.parametrize("how", [*DAMAGES, "gone", "a folder"])
def test_a_damaged_picture_is_named_or_replaced(
    how: str,
    worker_kind: Any,
    changes: dict[str, Augmentation],
    tmp_path: Path,
    make_pictures: Any,
) -> None:
    source = picture_folder(make_pictures(tmp_path, {"cat": 6, "dog": 6}), size=16)
    bad = Path(source.paths[5])
    damage(bad, how)
    options = {"reuse": 2, "workers": Workers(2, worker_kind), **changes}
    with ReuseLoader(source, BATCH, **options) as loader:
        with pytest.raises(DecodeError) as error:
            list(loader)
        assert str(bad) in str(error.value)
        assert "repair the file or remove it" in str(error.value)
        assert "sample 5 of pass 0" in "; ".join(error.value.__notes__)
    with ReuseLoader(source, BATCH, on_error="skip", **options) as loader:
        ids: Counter[int] = Counter()
        for pictures, _labels in loader:
            assert pictures.shape == (BATCH, 3, 16, 16)
            assert loader.last_batch is not None
            ids.update(loader.last_batch.ids.tolist())
        assert 5 not in ids
        assert sorted(ids.values()) == [2] * 10 + [4]
        assert loader.stats.skipped == 1
        assert str(bad) in loader.skipped[5]
    assert loader.stats.skipped == 1, "and this is still known when the loader is closed"
    assert list(loader.skipped) == [5]


# ---- who stands in ------------------------------------------------------------------------------


def neighbours(seed: int, samples: int) -> tuple[int, ...]:
    """Two samples that lie half a pass apart: each would stand in for the other."""
    order = [*source_order(samples, seed=seed, pass_index=0)]
    return int(order[1]), int(order[1 + samples // 2])


def skipping(bad: tuple[int, ...], **changes: Any) -> ReuseLoader:
    options = {"reuse": 3, "workers": 1, "augment": AUGMENT, "on_error": "skip", **changes}
    return ReuseLoader(sets.Pictures(24, bad), BATCH, **options)


def test_who_stands_in_for_two_that_would_for_each_other_does_not_depend_on_who_was_first() -> None:
    bad = neighbours(0, 24)
    whole = skipping(bad)
    tail = sets.served(whole)
    for batches in range(1, len(tail)):
        interrupted = skipping(bad)
        sets.served(interrupted, batches)
        resumed = skipping(bad, workers=2)
        resumed.load_state_dict(interrupted.state_dict())
        assert sets.served(resumed) == tail[batches:], batches
        resumed.close()
    whole.close()


@pytest.mark.parametrize("worker_kind", ["thread", "process"])
def test_a_resume_replaces_the_same_samples(worker_kind: Any) -> None:
    whole = skipping((2, 9))
    head_and_tail = sets.served(whole)
    for batches in (1, 7, 17):
        interrupted = skipping((2, 9))
        assert sets.served(interrupted, batches) == head_and_tail[:batches]
        resumed = skipping((2, 9), workers=Workers(2, worker_kind))
        resumed.load_state_dict(interrupted.state_dict())
        assert sets.served(resumed) == head_and_tail[batches:]
        resumed.close()
    whole.close()


@pytest.mark.parametrize("bad", [(0,), (0, 23)], ids=str)
def test_a_sample_that_cannot_be_read_may_be_one_of_those_that_are_measured(
    bad: tuple[int, ...],
) -> None:
    with skipping(bad, buffer_bytes=100_000) as loader:
        assert len(list(loader)) == 18
        assert set(loader.skipped) == set(bad)


def test_a_set_of_which_nothing_can_be_read_is_given_up() -> None:
    said = r"nor can the 10 that could stand in.*Repair the data set"
    with skipping(tuple(range(24))) as loader, pytest.raises(DecodeError, match=said):
        list(loader)


def test_a_set_smaller_than_the_replacements_is_given_up_after_each_of_its_samples() -> None:
    read: list[int] = []

    def broken(sample_id: int) -> Chunk:
        read.append(sample_id)
        return Chunk([], OSError("broken"))

    with pytest.raises(DecodeError, match="nor can the 2 that"):
        SkippedSamples("skip").replace(PassOrder(0, np.arange(3)), 0, OSError("broken"), broken)
    assert read == [1, 2]


@pytest.mark.parametrize("error", [FrozenDraw("drawn"), KeyboardInterrupt()], ids=repr)
def test_what_may_not_be_skipped_is_raised_where_a_replacement_raises_it(
    error: BaseException,
) -> None:
    skipped, order = SkippedSamples("skip"), PassOrder(0, np.arange(4))
    with pytest.raises(type(error)):
        skipped.replace(order, 0, OSError("broken"), lambda _: Chunk([], error))
    assert [*skipped.reasons] == [0]


# ---- what nobody thought of ---------------------------------------------------------------------


@pytest.mark.parametrize("given", [0, 1, 3])
def test_a_set_that_gives_another_number_of_samples_than_it_was_asked_for_is_named(
    given: int,
) -> None:
    class Many:
        def __len__(self) -> int:
            return 24

        def __getitem__(self, index: int) -> Any:
            return torch.full((2,), index), index

        def __getitems__(self, ids: list[int]) -> list[Any]:
            return [self[i] for i in [*ids, *ids][: given if given < 3 else len(ids) + 1]]

    with (
        ReuseLoader(Many(), BATCH, 1, workers=Workers(1, "thread")) as loader,
        pytest.raises(LoaderError, match=r"__getitems__ of Many gave \d+ samples for \d+ ids"),
    ):
        list(loader)
