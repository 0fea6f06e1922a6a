"""Passes of a stream that fail, are left, or go on with another stream."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.stream_shards import AUGMENT, Counted, Stateful, numbers, picture, shards, take, watch

from loaders import ReuseLoader
from loaders.errors import LoaderError, SourceError, StateError


class Failing(Counted):
    """Fails at one sample, as long as it is told so."""

    fails_at: int | None = None

    def sample(self, number: int) -> Any:
        if number == self.fails_at:
            raise OSError("the line is dead")
        return picture(number), number


def loader_of(stream: Any, **options: Any) -> ReuseLoader:
    usual = {"batch_size": 3, "reuse": 2, "buffer_batches": 2, "workers": 1, "augment": AUGMENT}
    return ReuseLoader(stream, **{**usual, **options})


# ---- what fails ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fails_at", [17, 23, 30])
@pytest.mark.parametrize(("reuse", "buffer_batches", "size"), [(1, 2, 5), (1, 4, 2), (3, 2, 5)])
def test_behind_an_error_of_the_stream_a_state_is_saved_that_goes_on_there(
    reuse: int, buffer_batches: int, size: int, fails_at: int
) -> None:
    options = {"reuse": reuse, "buffer_batches": buffer_batches, "batch_size": size}
    with loader_of(Counted(40), **options) as whole:
        expected = list(watch(whole))
    stream, head = Failing(40), list[Any]()
    with loader_of(stream, **options) as failed:
        stream.fails_at = fails_at
        with pytest.raises(OSError, match="the line is dead"):
            for served in watch(failed):
                head.append(served)
        state = failed.state_dict()
    stream.fails_at = None
    state["stream"]["identity"] = "Counted"
    with loader_of(Counted(40), **options) as resumed:
        resumed.load_state_dict(state)
        assert head + list(watch(resumed)) == expected


def test_an_iterable_that_fails_raises_its_own_error_and_the_next_pass_begins_anew() -> None:
    stream = Failing(20)
    with loader_of(stream, workers=2) as loader:
        stream.fails_at = 9
        with pytest.raises(OSError, match="the line is dead"):
            list(loader)
        stream.fails_at = None
        assert sorted(numbers(loader)) == sorted([*range(20)] * 2)


def test_a_resumed_pass_that_could_not_begin_is_begun_again_by_the_next_iter() -> None:
    with loader_of(Failing(60)) as loader:
        expected = take(loader, 30)[20:]
        loader.close()
    with loader_of(Failing(60)) as loader:
        take(loader, 20)
        state = loader.state_dict()
    stream = Failing(60)
    with loader_of(stream) as loader:
        loader.load_state_dict(state)
        stream.fails_at = 20
        with pytest.raises(OSError, match="the line is dead"):
            take(loader, 1)
        again = loader.state_dict()
        stream.fails_at = None
        assert take(loader, 10) == expected
    assert again["stream"] == state["stream"]
    with loader_of(stream) as loader:
        loader.load_state_dict(again)
        assert take(loader, 10) == expected


def test_the_end_of_the_program_says_nothing_of_a_stream_that_is_being_read() -> None:
    program = """
import threading
from torch.utils.data import IterableDataset
from loaders import ReuseLoader

class Endless(IterableDataset):
    def __iter__(self):
        yield from ([number] for number in range(8))
        reads.set()
        threading.Event().wait(30)

reads = threading.Event()
loader = ReuseLoader(Endless(), 4, 2, 2, workers=2)
batches = iter(loader)
next(batches), next(batches)
reads.wait()
"""
    made = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (made.returncode, made.stderr) == (0, "")


# ---- what is left -------------------------------------------------------------------------------


def test_a_loader_that_is_closed_in_mid_pass_holds_no_shard_open(tmp_path: Path) -> None:
    def opened() -> list[str]:
        links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return [os.readlink(link) for link in links if os.path.exists(link)]

    with shards(tmp_path) as loader:
        whole = [served for _ in range(2) for served in watch(loader)]
    with shards(tmp_path) as loader:
        head = take(loader, 3)
        state = loader.state_dict()
        assert [path for path in opened() if path.startswith(str(tmp_path))]
    assert not [path for path in opened() if path.startswith(str(tmp_path))]
    assert loader.state_dict() == state
    with loader:
        loader.load_state_dict(json.loads(json.dumps(state)))
        assert head + take(loader, len(whole) - 3) == whole


# ---- another stream -----------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("samples", [6, 14, 16, 17, 18, 20, 23, 24, 25, 30])
def test_a_pass_never_goes_on_with_a_stream_of_another_length(
    samples: int, drop_last: bool
) -> None:
    """If nobody had read to where the streams differ, nothing is known of it."""
    for served, kind in (10, Stateful), (10, Counted), (15, Stateful):
        with loader_of(kind(24), drop_last=drop_last) as loader:
            take(loader, served)
            state = loader.state_dict()
        last, end = state["stream"]["marks"]["last"], state["stream"]["marks"]["end"]
        with loader_of(kind(samples), drop_last=drop_last) as loader:
            loader.load_state_dict(state)
            if samples == 24 or (samples > last and end is None):
                assert list(watch(loader))
                continue
            with pytest.raises(StateError, match=r"shorter now|others than in the run"):
                list(watch(loader))


# ---- odd streams --------------------------------------------------------------------------------


@pytest.mark.parametrize("nones", [1, 5, 20])
def test_samples_that_are_none_at_the_beginning_get_to_the_collate(nones: int) -> None:
    class Late(Counted):
        def sample(self, number: int) -> Any:
            return None if number < nones else (picture(number), number)

    def there(samples: list[Any]) -> list[int]:
        return [sample[1] for sample in samples if sample is not None]

    with ReuseLoader(Late(20), 4, 2, 2, workers=2, collate=there) as loader:
        if nones == 20:
            with pytest.raises(LoaderError, match="None"):
                list(loader)
        else:
            served = [number for batch in loader for number in batch]
            assert sorted(served) == sorted([*range(nones, 20)] * 2)


def test_a_stream_whose_length_is_none_is_refused() -> None:
    class Sized(Counted):
        def __len__(self) -> int:
            return self.samples

    with pytest.raises(SourceError, match="says that it is empty"):
        ReuseLoader(Sized(0), 4, 2)


def test_a_stream_that_is_shorter_than_its_length_is_told_of_by_that_name() -> None:
    class Sized(Counted):
        def __len__(self) -> int:
            return self.samples + 1

    with (
        ReuseLoader(Sized(9), 4, 2, workers=1) as loader,
        pytest.raises(SourceError, match=r"before sample 9, but its len\(\) promises 10"),
    ):
        list(loader)
