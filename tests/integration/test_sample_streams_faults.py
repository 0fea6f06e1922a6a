"""Bad tars, bad iterables and wrong arguments: every one is refused by its name and place."""

import gzip
import logging
import random
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.stream_shards import (
    AUGMENT,
    Counted,
    decoded,
    jpeg_tar,
    shards,
    write_shards,
    write_tar,
)
from torch.utils.data import IterableDataset

from loaders import Cache, LaneLoader, LoaderError, ReuseLoader, SharedStream, Workers
from loaders.errors import DecodeError, SourceError, StateError
from loaders.streams import IterableSamples, TarShards

# ---- bad input ----------------------------------------------------------------------------------


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def add_link(path: Path) -> None:
    with tarfile.open(path, "a") as tar:
        info = tarfile.TarInfo("all/link.bin")
        info.type, info.linkname = tarfile.SYMTYPE, "00000.bin"
        tar.addfile(info)


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[2048:2060] = b"\xff" * 12
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (
            lambda path: cut(path, 5 * 512 + 7),
            r"00001.bin of .*shard-000.tar at byte 2560: 7 of 18",
        ),
        (lambda path: cut(path, 4 * 512), r"shard-000.tar is cut off at byte 2048"),
        (lambda path: cut(path, 4 * 512 + 100), r"shard-000.tar is cut off at byte 2148"),
        (damage, r"shard-000.tar is damaged at byte 2560"),
        (lambda path: cut(path, 0), "cut off at byte 0"),
        (lambda path: path.write_bytes(gzip.compress(path.read_bytes())), r"compressed \(gzip\)"),
        (lambda path: write_tar(path, [3, 4, 4]), r"00004.bin comes twice"),
        (add_link, "link.bin is a link to 00000.bin"),
        (lambda path: path.unlink(), "cannot open .*shard-000.tar"),
    ],
    ids=["data", "header", "in a header", "damage", "empty", "gzip", "twice", "link", "gone"],
)
@pytest.mark.parametrize("workers", [1, 3])
def test_a_bad_tar_is_named_with_its_place_at_the_same_batch_for_any_number_of_workers(
    break_it: Callable[[Path], None], said: str, workers: int, tmp_path: Path
) -> None:
    write_shards(tmp_path, (30, 30))
    good = tmp_path / "shard-000.tar"
    bad = tmp_path / "bad"
    bad.mkdir()
    shutil.copy(tmp_path / "shard-001.tar", first := bad / "first.tar")
    shutil.copy(good, second := bad / "shard-000.tar")
    break_it(second)
    source = TarShards([first, second], decoded)
    options = {"shuffle": False, "augment": AUGMENT, "workers": workers}
    with ReuseLoader(source, 4, 2, 2, **options) as loader:
        served = 0
        with pytest.raises(LoaderError, match=said):
            for _ in loader:
                served += 1
    assert served >= 9, "what lies before the fault is served"
    with ReuseLoader(source, 4, 2, 2, **{**options, "workers": 2}) as loader:
        again = 0
        with pytest.raises(LoaderError, match=said):
            for _ in loader:
                again += 1
    assert again == served


def test_a_sample_that_cannot_be_decoded_is_named_by_its_shard(tmp_path: Path) -> None:
    def failing(files: dict[str, Any]) -> Any:
        if files["__key__"] == "all/00007":
            raise ValueError("no such luck")
        return decoded(files)

    write_shards(tmp_path, (6, 6))
    source = TarShards(str(tmp_path / "shard-*.tar"), failing)
    with ReuseLoader(source, 4, 2, 2, workers=2) as loader, pytest.raises(ValueError) as caught:
        list(loader)
    assert f"while decoding {tmp_path}/shard-001.tar:all/00007" in caught.value.__notes__


@pytest.mark.parametrize(
    ("labels", "only"), [({"a1": "cat", "a2": "dog"}, ""), ({"a1": "1", "a2": "2"}, "cls")]
)
def test_a_picture_without_the_number_of_its_class_says_what_to_do(
    labels: dict[str, str], only: str, tmp_path: Path
) -> None:
    jpeg_tar(tmp_path / "a.tar", labels, only=only)
    with (
        ReuseLoader([tmp_path / "a.tar"], 2, 1, workers=1) as loader,
        pytest.raises(DecodeError, match=r"a\.tar:a[12] is not one picture.*decode="),
    ):
        list(loader)


def test_a_stream_that_ends_before_its_promise_is_an_error_that_names_both(tmp_path: Path) -> None:
    with (
        shards(tmp_path, samples=23, batch_size=2) as loader,
        pytest.raises(SourceError, match=r"ended before sample 22, but .* promises 23"),
    ):
        list(loader)


@pytest.mark.parametrize(("samples", "drop_last"), [(0, False), (3, True)])
def test_a_stream_that_fills_no_batch_is_refused(samples: int, drop_last: bool) -> None:
    with (
        ReuseLoader(Counted(samples), 4, 2, drop_last=drop_last, workers=1) as loader,
        pytest.raises(SourceError, match=rf"\(samples: {samples}\) fills no batch of 4"),
    ):
        list(loader)


def test_a_tar_that_changes_its_length_between_passes_is_named(tmp_path: Path) -> None:
    with shards(tmp_path) as loader:
        list(loader)
        write_tar(tmp_path / "shard-001.tar", range(40, 60))
        with pytest.raises(SourceError, match=r"shard-001.tar has \d+ bytes now, and had \d+"):
            list(loader)


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        ([], "list is empty"),
        (["a.tar", "b.tar", "a.tar"], "a.tar is listed 2 times"),
        ("no-such-folder/*.tar", "there is no file"),
    ],
)
def test_wrong_lists_of_tars_are_refused(paths: Any, said: str) -> None:
    with pytest.raises(SourceError, match=said):
        TarShards(paths)


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": [1, 2]},
        {"buffer_bytes": 1 << 30},
        {"on_error": "skip"},
        {"workers": Workers(kind="process")},
        {"workers": Workers(timeout=5.0)},
        {"cache": Cache("ram", 1 << 20)},
    ],
)
def test_what_needs_numbered_samples_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="does not go with a stream"):
        ReuseLoader(Counted(20), **options)


def test_a_generator_is_refused_because_it_has_one_pass_only() -> None:
    with pytest.raises(LoaderError, match="can be iterated once only"):
        ReuseLoader(iter([1, 2, 3]), 1)


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (lambda: IterableSamples(Counted(20), True), "samples=n"),
        (lambda: IterableSamples(Counted(20), samples=20), "sharded=True"),
        (lambda: TarShards(["a.tar"], samples=20), "1 tars cannot be dealt to 2"),
        (lambda: TarShards(["a.tar", "b.tar"], samples=21), "no multiple of 2"),
    ],
)
def test_what_ranks_cannot_share_is_refused_with_what_to_do(
    stream: Callable[[], Any], said: str
) -> None:
    with (
        ReuseLoader(stream(), 4, 2, rank=(1, 2)) as loader,
        pytest.raises(LoaderError, match=said),
    ):
        list(loader)


@pytest.mark.parametrize("sharing", [SharedStream, lambda loader: LaneLoader(loader, lanes=2)])
def test_streams_are_neither_shared_nor_dealt_in_lanes(sharing: Callable[[Any], Any]) -> None:
    with ReuseLoader(Counted(20), 4, 2) as loader, pytest.raises(LoaderError, match="a stream"):
        sharing(loader)


# ---- streams that draw by chance ----------------------------------------------------------------


class Noisy(IterableDataset[Any]):
    def __iter__(self) -> Any:
        for number in range(16):
            yield torch.rand(2), number


class ShuffledByChance(IterableDataset[Any]):
    """As a pipeline that seeds itself by the time."""

    def __iter__(self) -> Any:
        order = list(range(24))
        random.SystemRandom().shuffle(order)
        yield from (torch.tensor([number]) for number in order)


def noisy_decode(files: dict[str, Any]) -> torch.Tensor:
    return torch.rand(3)


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: Noisy(),
        lambda folder: ShuffledByChance(),
        lambda folder: TarShards(write_shards(folder, [4, 4]), noisy_decode),
    ],
    ids=["in iter", "its order", "in decode"],
)
def test_a_stream_that_draws_is_told_of_where_reuse_repeats_its_draws(
    make: Callable[[Path], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stream, before = make(tmp_path), torch.get_rng_state()
    for changes, told in (({}, 1), ({"reuse": 1}, 0), ({"reaugment": False}, 0)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "loaders"):
            ReuseLoader(stream, **{"batch_size": 4, "reuse": 2, **changes}).close()
        found = [text for text in caplog.messages if "draws by chance" in text]
        assert len(found) == told, changes
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("served", range(1, 11))
def test_a_pass_of_a_stream_in_another_order_is_never_resumed_with_other_samples(
    served: int,
) -> None:
    def loader() -> ReuseLoader:
        return ReuseLoader(ShuffledByChance(), 4, 2, workers=1, reaugment=False)

    with loader() as first:
        batches = iter(first)
        for _ in range(served):
            next(batches)
        state = first.state_dict()
    for _ in range(3):
        with loader() as second, pytest.raises(StateError, match="others than in the run"):
            second.load_state_dict(state)
            list(second)
