"""The decoded cache through the loader: who is decoded, who is not, and the same batches."""

import importlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from loaders import ReuseLoader
from loaders.cache.cache import RAM_ENTRY_BYTES
from loaders.pixels.augmentation import Chain, Flip, PadCrop

pytestmark = pytest.mark.timeout(30)

AUGMENT = Chain([PadCrop(2), Flip()])
SAMPLES = 40
KINDS = ["ram", "disk"]


@pytest.fixture
def sets(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The data sets of loader_datasets.py, where a worker process finds them too."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("loader_datasets")


@pytest.fixture
def cached(sets: Any, tmp_path: Path) -> Any:
    """`cached("disk")`: a loader with such a cache, the same folder every time."""

    def make(kind: str, limit: int = 10**6, **changes: Any) -> ReuseLoader:
        folder = {"cache_dir": tmp_path / "cache"} if kind == "disk" else {}
        options = {"reuse": 3, "workers": 2, "augment": AUGMENT, **folder, **changes}
        source = sets.Pictures(SAMPLES, count=tmp_path / "counted")
        return ReuseLoader(source, 4, cache=kind, cache_bytes=limit, **options)  # pyright: ignore[reportArgumentType]

    return make


@pytest.fixture
def plain(sets: Any) -> Any:
    def make(**changes: Any) -> ReuseLoader:
        options = {"reuse": 3, "workers": 1, "augment": AUGMENT, **changes}
        return ReuseLoader(sets.Pictures(SAMPLES), 4, **options)

    return make


@pytest.mark.parametrize("worker_kind", ["thread", "process"])
@pytest.mark.parametrize("kind", KINDS)
def test_later_passes_decode_nothing_and_serve_the_same(
    kind: str, worker_kind: Any, cached: Any, plain: Any, sets: Any, tmp_path: Path
) -> None:
    with plain() as without, cached(kind, worker_kind=worker_kind) as loader:
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
    once: bool, cached: Any, plain: Any, sets: Any, tmp_path: Path
) -> None:
    changes = {"augment": None, "once": AUGMENT} if once else {}
    with cached("disk", **changes) as first:
        list(first)
    before = (tmp_path / "counted").stat().st_size
    with plain(**changes) as without, cached("disk", **changes) as second:
        assert sets.served(second) == sets.served(without)
        assert second.stats.decoded == second.stats.extra_decodes == 0
        assert second.stats.cached == SAMPLES
    # Three for the fingerprint, one to lay out the slots.
    assert (tmp_path / "counted").stat().st_size - before <= 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_cache_gives_the_same_share_of_every_pass(
    kind: str, cached: Any, plain: Any, sets: Any
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
    kind: str, batches: int, once: bool, cached: Any, plain: Any, sets: Any
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
    kind: str, cached: Any, plain: Any, sets: Any
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
    kind: str, cached: Any, sets: Any, tmp_path: Path
) -> None:
    def skipping(**changes: Any) -> ReuseLoader:
        options = {"reuse": 2, "workers": 1, "augment": AUGMENT, "on_error": "skip", **changes}
        return ReuseLoader(sets.Pictures(SAMPLES, (4, 30)), 4, **options)

    folder = {"cache_dir": tmp_path / "cache"} if kind == "disk" else {}
    with skipping() as without, skipping(cache=kind, cache_bytes=10**6, **folder) as loader:
        for _ in range(3):
            assert sets.served(loader) == sets.served(without)
        assert set(loader.skipped) == {4, 30}
