"""The decoded cache through the loader: who is decoded, who is not, and the same batches."""

from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from support import loader_datasets as sets

from loaders import Cache, ReuseLoader, Workers
from loaders.cache.cache import RAM_ENTRY_BYTES
from loaders.cache.fingerprint import VERIFIED
from loaders.errors import CacheError
from loaders.pixels.augmentation import Chain, Flip, PadCrop

AUGMENT = Chain([PadCrop(2), Flip()])
SAMPLES = 40
KINDS = ["ram", "disk"]


@pytest.fixture
def cached(tmp_path: Path) -> Any:
    """`cached("disk")`: a loader with such a cache, the same folder every time."""

    def make(kind: str, limit: int = 10**6, **changes: Any) -> ReuseLoader:
        kept = Cache(cast(Any, kind), limit, tmp_path / "cache" if kind == "disk" else None)
        options = {"reuse": 3, "workers": 2, "augment": AUGMENT, **changes}
        source = sets.Pictures(SAMPLES, count=tmp_path / "counted")
        return ReuseLoader(source, 4, cache=kept, **options)  # pyright: ignore[reportArgumentType]

    return make


@pytest.fixture
def plain() -> Any:
    def make(**changes: Any) -> ReuseLoader:
        options = {"reuse": 3, "workers": 0, "augment": AUGMENT, **changes}
        return ReuseLoader(sets.Pictures(SAMPLES), 4, **options)

    return make


@pytest.mark.parametrize("worker_kind", ["thread", "process"])
@pytest.mark.parametrize("kind", KINDS)
def test_later_passes_decode_nothing_and_serve_the_same(
    kind: str, worker_kind: Any, cached: Any, plain: Any, tmp_path: Path
) -> None:
    with plain() as without, cached(kind, workers=Workers(2, worker_kind)) as loader:
        (tmp_path / "counted").unlink()  # it has looked whether reading repeats itself
        for number in range(3):
            assert sets.served(loader) == sets.served(without)
            stats = loader.stats
            assert stats.decoded == SAMPLES
            assert stats.cached == SAMPLES * number
            assert stats.reused == SAMPLES * 2 * (number + 1)
            assert stats.served == stats.decoded + stats.cached + stats.reused
        # On disk, the data set's fingerprint is taken of three samples; a process reads the first
        # one again, to lay out the slots.
        assert (tmp_path / "counted").stat().st_size <= SAMPLES + 4


@pytest.mark.parametrize("once", [False, True])
def test_a_second_loader_on_the_same_folder_decodes_nothing(
    once: bool, cached: Any, plain: Any, tmp_path: Path
) -> None:
    changes = {"augment": None, "once": AUGMENT} if once else {}
    with cached("disk", **changes) as first:
        list(first)
    with plain(**changes) as without, cached("disk", **changes) as second:
        before = (tmp_path / "counted").stat().st_size
        assert sets.served(second) == sets.served(without)
        assert second.stats.decoded == second.stats.extra_decodes == 0
        assert second.stats.cached == SAMPLES
    # Three for the fingerprint, one to lay out the slots, and those that are compared.
    assert (tmp_path / "counted").stat().st_size - before <= 4 + VERIFIED


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_cache_gives_the_same_share_of_every_pass(
    kind: str, cached: Any, plain: Any
) -> None:
    limit = 10 * (3 * 64 + 8 + RAM_ENTRY_BYTES) if kind == "ram" else 8000
    with plain() as without, cached(kind, limit) as loader:
        found = []
        for _ in range(4):
            assert sets.served(loader) == sets.served(without)
            found.append(loader.stats.cached)
            assert 0 < loader.stats.cache_bytes <= limit
        shares = [after - before for before, after in pairwise(found)]
        assert found[0] == 0
        assert 0 < shares[0] < SAMPLES
        assert len(set(shares)) == 1


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("batches", [1, 13, 29, 30, 44])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_with_a_cache_gives_the_same_tail(
    kind: str, batches: int, once: bool, cached: Any, plain: Any
) -> None:
    changes = {"augment": None, "once": AUGMENT} if once else {}
    with plain(**changes) as without:
        whole = sets.served(without) + sets.served(without)
    with cached(kind, **changes) as interrupted:
        taken = sets.served(interrupted, batches)
        if len(taken) < batches:
            taken += sets.served(interrupted, batches - len(taken))
        assert taken == whole[:batches]
        state = interrupted.state_dict()
    with cached(kind, **changes) as resumed:
        resumed.load_state_dict(state)
        tail = sets.served(resumed)
        assert tail == whole[batches : batches + len(tail)]
        assert len(tail) == 30 - batches % 30
        if kind == "disk":
            refilled = resumed.stats.decoded + resumed.stats.extra_decodes
            assert refilled <= SAMPLES, "what the first run had kept was not decoded again"


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_is_written_to_does_not_change_the_cache(
    kind: str, cached: Any, plain: Any
) -> None:
    with plain(augment=None) as without, cached(kind, augment=None) as loader:
        for _ in range(2):
            for pictures, labels in loader:
                pictures.zero_()
                labels.zero_()
        list(without)
        list(without)
        assert sets.served(loader) == sets.served(without)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_that_stands_in_for_another_is_cached_as_itself(
    kind: str, cached: Any, tmp_path: Path
) -> None:
    def skipping(**changes: Any) -> ReuseLoader:
        options = {"reuse": 2, "workers": 1, "augment": AUGMENT, "on_error": "skip", **changes}
        return ReuseLoader(sets.Pictures(SAMPLES, (4, 30)), 4, **options)

    kept = Cache(cast(Any, kind), 10**6, tmp_path / "cache" if kind == "disk" else None)
    with skipping() as without, skipping(cache=kept) as loader:
        for _ in range(3):
            assert sets.served(loader) == sets.served(without)
        assert set(loader.skipped) == {4, 30}


# ---- data that changed --------------------------------------------------------------------------


class LabelTable:
    """Sample i is (zeros, its label), of a file that is open."""

    def __init__(self, path: Path) -> None:
        self.labels = path.open()

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.labels.seek(0)
        return torch.zeros(2), int(self.labels.read().split()[index].split(",")[1])


def labels_served(source: Any, folder: Path, key: str | None = None) -> list[int]:
    cache = Cache("disk", 10**6, folder, key)
    with ReuseLoader(source, 50, 1, shuffle=False, workers=1, cache=cache) as loader:
        return [int(label) for _, labels in loader for label in labels]


def write_table(path: Path, labels: list[int]) -> None:
    path.write_text("".join(f"{n},{label}\n" for n, label in enumerate(labels)))


def test_a_key_vouches_for_an_open_file_until_a_sample_differs(tmp_path: Path) -> None:
    table, folder = tmp_path / "labels.csv", tmp_path / "cache"
    write_table(table, [1] * 400)
    sources = []

    def source() -> Any:
        sources.append(LabelTable(table))
        return sources[-1]

    with pytest.raises(CacheError, match=r"data set.labels \(_io.TextIOWrapper\).*key="):
        labels_served(source(), folder)
    assert labels_served(source(), folder, key="v1") == [1] * 400
    assert labels_served(source(), folder, key="v1") == [1] * 400
    changed = [1] * 2 + [2] * 396 + [1] * 2
    write_table(table, changed)
    with pytest.raises(CacheError, match=r"sample \d+ of the decoded cache .* not what LabelTable"):
        labels_served(source(), folder, key="v1")
    assert labels_served(source(), folder, key="v2") == changed
    for opened in sources:
        opened.labels.close()


# ---- two runs at once ---------------------------------------------------------------------------


def test_two_runs_that_begin_together_serve_the_same_and_keep_a_sample_once(
    cached: Any, plain: Any, tmp_path: Path
) -> None:
    with plain() as without:
        whole = [[*without] for _ in range(3)]
    with cached("disk") as first, cached("disk") as second:
        for number in range(3):
            for mine, other, expected in zip(first, second, whole[number], strict=True):
                assert all(map(torch.equal, mine, expected))
                assert all(map(torch.equal, other, expected))
        assert first.stats.cached == 2 * SAMPLES
        assert second.stats.cached >= SAMPLES  # all were there when its last pass began
    [_] = (tmp_path / "cache").rglob("writer-*.data")
