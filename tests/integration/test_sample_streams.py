"""A ReuseLoader over tars and iterables: what it is called with, resumes from, and refuses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.stream_shards import (
    AUGMENT,
    Counted,
    Stateful,
    jpeg_tar,
    numbers,
    shards,
    take,
    watch,
    write_tar,
)

from loaders import LoaderError, ReuseLoader
from loaders.errors import StateError
from loaders.streams import TarShards

# ---- what a user calls --------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["braces", "star", "list", "one in a list", "TarShards"])
def test_tars_of_pictures_are_served_by_their_pattern(how: str, tmp_path: Path) -> None:
    for shard in range(2):
        jpeg_tar(tmp_path / f"s-{shard}.tar", {f"{shard}{n}": str(shard) for n in range(4)})
    given: Any = {
        "braces": str(tmp_path / "s-{0..1}.tar"),
        "star": str(tmp_path / "s-?.tar"),
        "list": [tmp_path / "s-0.tar", tmp_path / "s-1.tar"],
        "one in a list": [str(tmp_path / "s-1.tar")],
        "TarShards": TarShards(str(tmp_path / "s-{0,1}.tar"), size=8),
    }[how]
    with ReuseLoader(given, 4, reuse=1, workers=2) as loader:
        batches = list(loader)
    labels = torch.cat([labels for _, labels in batches]).tolist()
    assert sorted(labels) == ([1] * 4 if how == "one in a list" else [0] * 4 + [1] * 4)
    side = 8 if how == "TarShards" else 16
    assert batches[0][0].shape == (4, 3, side, side)
    assert batches[0][0].dtype == torch.uint8


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("{8..10}", ["8", "9", "10"]),
        ("{08..10}", ["08", "09", "10"]),
        ("{9..011}", ["009", "010", "011"]),
        ("{2..0}", ["2", "1", "0"]),
        ("{a,b}{0..1}", ["a0", "a1", "b0", "b1"]),
    ],
)
def test_braces_stand_for_what_a_shell_makes_of_them(pattern: str, names: list[str]) -> None:
    assert TarShards(f"s-{pattern}.tar").paths == [f"s-{name}.tar" for name in names]


def test_a_stream_of_unknown_length_has_no_len_and_a_promised_one_has(tmp_path: Path) -> None:
    with shards(tmp_path) as loader, pytest.raises(TypeError, match="samples=n"):
        len(loader)
    with shards(tmp_path, samples=20) as loader:
        assert len(loader) == 10
        assert len(set(numbers(loader))) == 20, "the rest of the stream is left out of this pass"


def test_a_data_set_that_knows_its_length_makes_the_loader_know_its_own() -> None:
    class Sized(Counted):
        def __len__(self) -> int:
            return self.samples

    with ReuseLoader(Sized(10), 4, 2, workers=1) as loader:
        assert len(loader) == 5 == len(list(loader))


@pytest.mark.parametrize("more", [0, 1])
def test_a_data_set_that_gives_more_than_its_length_is_told_of(
    more: int, caplog: pytest.LogCaptureFixture
) -> None:
    class Sized(Counted):
        def __len__(self) -> int:
            return self.samples - more

    with ReuseLoader(Sized(10), 4, 2, workers=2) as loader:
        assert len(set(numbers(loader))) == 10 - more
    assert ("has more samples than its len() says (9 on this rank)" in caplog.text) == bool(more)


def test_reuse_and_limits_change_between_passes(tmp_path: Path) -> None:
    with shards(tmp_path) as loader:
        assert len(take(loader, 3)) == 3  # and leave the pass
        loader.set_reuse(3, batch_size=5)
        assert len(list(watch(loader))) == -(-22 * 3 // 5)
        loader.limit_pass(4)
        assert len(list(watch(loader))) == 4
        loader.limit_pass(400)
        assert len(list(watch(loader))) == -(-22 * 3 // 5)
        assert loader.stats.decoded > 44


# ---- resume -------------------------------------------------------------------------------------


def test_a_resumed_pass_opens_no_shard_that_is_done(tmp_path: Path) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    options = {"shuffle": False, "reuse": 1, "batch_size": 3}
    with shards(folder, (9, 9, 9, 9, 9), **options) as loader:
        whole = list(watch(loader))
        head = take(loader, 11)
        state = json.loads(json.dumps(loader.state_dict()))
    for done in (0, 1):
        write_tar(folder / f"shard-{done:03d}.tar", [])
    with shards(folder, **options) as loader:
        loader.load_state_dict(state | {"pass": 0})
        assert head != whole[:11], "passes are augmented differently"
        assert [served[0] for served in watch(loader)] == [served[0] for served in whole[11:]]


class Streaming(Counted):
    """As LitData's: it is its own iterator, and its state wants to be told what it gave."""

    def __iter__(self) -> Any:
        self.samples_of_pass = super().__iter__()
        return self

    def __next__(self) -> Any:
        return next(self.samples_of_pass)

    def state_dict(self, num_samples_yielded: int) -> dict[str, int]:
        raise AssertionError("nobody can tell it")

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError("there is none")


@pytest.mark.parametrize("kind", [Counted, Stateful, Streaming])
def test_an_iterable_with_a_state_is_not_iterated_from_its_beginning(
    kind: type[Counted],
) -> None:
    def loader(stream: Counted) -> ReuseLoader:
        return ReuseLoader(stream, 4, 2, 2, augment=AUGMENT, workers=1)

    with loader(kind(200)) as interrupted:
        take(interrupted, 70)
        state = interrupted.state_dict()
    with loader(again := kind(200)) as resumed:
        again.read = 0  # some were read to see whether it draws by chance
        resumed.load_state_dict(state)
        list(watch(resumed))
    assert again.read == 200 if kind is not Stateful else again.read < 200 - 100


def test_a_rank_goes_on_with_the_state_of_another(tmp_path: Path) -> None:
    def rank(number: int) -> ReuseLoader:
        return shards(tmp_path, rank=(number, 2), samples=16)

    with rank(0) as first, rank(1) as second:
        tails = [list(watch(second)) for _ in range(2)]
        head = take(first, 2)
        assert head != tails[0][:2]
        state = first.state_dict()
    with rank(1) as resumed:
        resumed.load_state_dict(state)
        assert list(watch(resumed)) == tails[0][2:]
        assert list(watch(resumed)) == tails[1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda folder: write_tar(folder / "shard-004.tar", [99]),
            "this loader's stream is 5 tars",
        ),
        (
            lambda folder: write_tar(folder / "shard-002.tar", range(50, 58)),
            "are others than in",
        ),
        (
            lambda folder: write_tar(folder / "shard-002.tar", range(9, 20)),
            "are others than in",
        ),
    ],
    ids=["more shards", "another sample", "another length"],
)
def test_a_state_of_other_tars_is_refused(
    change: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    with shards(tmp_path, shuffle=False) as loader:
        take(loader, 8)
        state = loader.state_dict()
    change(tmp_path)
    with shards(tmp_path, shuffle=False) as loader, pytest.raises(LoaderError, match=said):
        loader.load_state_dict(state)
        take(loader, 1)


def test_a_stream_that_has_become_shorter_than_the_state_is_refused() -> None:
    with ReuseLoader(Counted(40), 4, 2, workers=1) as loader:
        take(loader, 12)
        state = loader.state_dict()
    with (
        ReuseLoader(Counted(10), 4, 2, workers=1) as loader,
        pytest.raises(StateError, match="it ends before sample 10 here"),
    ):
        loader.load_state_dict(state)
        take(loader, 1)


def test_states_of_streams_and_of_lists_are_not_mixed_up(tmp_path: Path) -> None:
    pairs = [(torch.zeros(3, 2, 2), i) for i in range(22)]
    stream = shards(tmp_path, samples=22, augment=None)
    listed = ReuseLoader(pairs, 4, 2, 2)
    with pytest.raises(StateError, match="that of a stream"):
        listed.load_state_dict(stream.state_dict())
    with pytest.raises(StateError, match="a loader without a stream"):
        stream.load_state_dict(listed.state_dict())


def test_a_stream_with_less_than_a_batch_has_all_of_it_in_each_batch() -> None:
    with ReuseLoader(Counted(3), 8, 2, workers=1, augment=AUGMENT) as loader:
        first, *_ = whole = [*watch(loader), *watch(loader)]
        assert [sorted(served) for served, *_ in whole] == [[0, 1, 2]] * 4
    with ReuseLoader(Counted(3), 8, 2, workers=1, augment=AUGMENT) as interrupted:
        assert take(interrupted, 1) == [first]
        state = interrupted.state_dict()
    with ReuseLoader(Counted(3), 8, 2, workers=1, augment=AUGMENT) as resumed:
        resumed.load_state_dict(state)
        assert take(resumed, 3) == whole[1:]
