"""The decoded cache in RAM, what it keeps of a sample, and the name of a data set's cache."""

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from loaders.cache.cache import DecodedCache, RamCache
from loaders.cache.fingerprint import fingerprint
from loaders.errors import CacheError, LoaderError
from loaders.slots.slab import Slab
from loaders.sources.datasets import PictureArrays

MIB = 2**20


def picture(value: int, height: int = 4, width: int = 5) -> torch.Tensor:
    """[3, H, W] over [H, W, 3] memory, as the decoders give."""
    pixels = np.random.default_rng(value).integers(0, 256, (height, width, 3), np.uint8)
    return torch.from_numpy(pixels).permute(2, 0, 1)


# ---- what is kept -------------------------------------------------------------------------------


def test_a_sample_that_was_offered_is_found_and_no_other() -> None:
    with RamCache(MIB) as cache:
        assert cache.read(3) is None
        assert cache.offer(3, [picture(3), 7])
        found = cache.read(3)
        assert found is not None
        assert torch.equal(found[0], picture(3))
        assert found[1] == 7
        assert type(found[1]) is int
        assert cache.read(4) is None
        assert cache.entries == 1


def test_a_picture_comes_back_in_the_layout_it_had_so_that_a_slot_takes_it_in_one_copy() -> None:
    with RamCache(MIB) as cache:
        cache.offer(0, [picture(0), 1])
        found = cache.read(0)
        assert found is not None
        assert found[0].stride() == picture(0).stride() == (1, 15, 3)
        slab = Slab((picture(1), 1), 2)
        slab.write(1, found, 0)
        assert torch.equal(slab.sample(1)[0], picture(0))


def test_the_cache_keeps_a_copy_and_gives_views_of_it() -> None:
    given_in = picture(0)
    with RamCache(MIB) as cache:
        cache.offer(0, [given_in])
        given_in.zero_()
        once, again = cache.read(0), cache.read(0)
        assert once is not None
        assert again is not None
        assert torch.equal(once[0], picture(0))
        assert once[0].data_ptr() == again[0].data_ptr()


def test_nobody_writes_into_an_array_of_numpy() -> None:
    with RamCache(MIB) as cache:
        cache.offer(0, [np.arange(4), np.float32(2)])
        found = cache.read(0)
        assert found is not None
        with pytest.raises(ValueError, match="read-only"):
            found[0][0] = 1
        assert type(found[1]) is np.float32


def test_a_tensor_that_learns_is_kept_without_its_graph() -> None:
    with RamCache(MIB) as cache:
        cache.offer(0, [torch.ones(2, requires_grad=True) * 2])
        found = cache.read(0)
        assert found is not None
        assert not found[0].requires_grad
        assert found[0].tolist() == [2, 2]


class Opaque:
    """A leaf that has no bytes to keep."""


@pytest.mark.parametrize(
    "leaf",
    [
        Opaque(),
        {1, 2},
        np.array([Opaque()]),
        np.zeros(2, [("x", "i4")]),
        np.ma.masked_array([1, 2], [True, False]),
        torch.zeros(2, 2).to_sparse(),
        torch.zeros(2, device="meta"),
    ],
    ids=["object", "set", "objects", "fields", "masked", "sparse", "no memory"],
)
def test_what_cannot_be_kept_is_refused_and_said_once(
    leaf: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with RamCache(MIB) as cache:
        assert not cache.offer(5, [leaf, 1])
        assert not cache.offer(6, [leaf, 1])
        assert cache.read(5) is None
        assert cache.entries == cache.nbytes == 0
    [record] = caplog.records
    assert "sample 5 and others like it are not kept" in record.message
    assert type(leaf).__name__ in record.message


# ---- the limit ----------------------------------------------------------------------------------


def test_a_full_cache_refuses_what_does_not_fit_and_keeps_what_it_has() -> None:
    with RamCache(10_000) as cache:
        taken = [cache.offer(i, [torch.full((1000,), i, dtype=torch.uint8)]) for i in range(20)]
        kept = sum(taken)
        assert 5 <= kept <= 9
        assert taken == [True] * kept + [False] * (20 - kept)
        for i in range(kept):
            found = cache.read(i)
            assert found is not None
            assert found[0][0] == i
        assert cache.read(kept) is None


def test_a_smaller_sample_may_fit_where_a_larger_one_did_not() -> None:
    with RamCache(5_000) as cache:
        assert not cache.offer(0, [torch.zeros(5_000)])
        assert cache.offer(1, [torch.zeros(10)])
        assert cache.offer(0, [torch.zeros(10)])


def test_every_entry_costs_its_bytes_and_the_same_above_them() -> None:
    def cost(size: int) -> int:
        with RamCache(MIB) as cache:
            assert cache.offer(0, [torch.zeros(size, dtype=torch.uint8)])
            return cache.nbytes

    assert cost(5_000) - cost(0) == 5_000
    assert 300 < cost(0) < 1_000


def test_a_sample_that_fills_the_cache_to_its_last_byte_fits_and_a_byte_more_does_not() -> None:
    sample = [torch.zeros(1_000, dtype=torch.uint8)]
    with RamCache(MIB) as roomy:
        assert roomy.offer(0, sample)
        needed = roomy.nbytes
    with RamCache(needed) as just_enough, RamCache(needed - 1) as too_small:
        assert just_enough.offer(0, sample)
        assert not too_small.offer(0, sample)
        assert (just_enough.nbytes, too_small.nbytes) == (needed, 0)


def test_a_closed_cache_is_empty_and_what_it_gave_is_still_there() -> None:
    cache: DecodedCache = RamCache(MIB)
    cache.offer(0, [picture(0)])
    found = cache.read(0)
    assert found is not None
    cache.close()
    cache.close()
    assert cache.entries == cache.nbytes == 0
    assert cache.read(0) is None
    assert not cache.offer(1, [picture(1)])
    assert torch.equal(found[0], picture(0))


# ---- the name of a data set ---------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    by: int


class Numbers:
    """Sample i is `values[i]`."""

    def __init__(self, values: list[Any], transform: Any = None) -> None:
        self.values = values
        self.transform = transform

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Any:
        return self.values[index]


class OtherNumbers(Numbers):
    pass


def numbers(*values: Any, transform: Any = None) -> Numbers:
    return Numbers([torch.tensor(v) for v in values], transform)


def test_the_same_data_have_the_same_name_in_every_run() -> None:
    one = fingerprint(numbers(1, 2, 3, transform=Opaque()))
    assert one == fingerprint(numbers(1, 2, 3, transform=Opaque()))
    assert len(one) == 32
    assert int(one, 16) >= 0


@pytest.mark.parametrize(
    "other",
    [
        numbers(1, 2, 4),
        numbers(0, 2, 3),
        numbers(1, 2, 2, 3),
        numbers(1.0, 2.0, 3.0),
        numbers([1], [2], [3]),
        numbers(1, 2, 3, transform=Scale(2)),
        OtherNumbers([torch.tensor(v) for v in (1, 2, 3)]),
        Numbers([(torch.tensor(v),) for v in (1, 2, 3)]),
        Subset(cast(Any, numbers(1, 2, 3)), [0, 1, 2]),
    ],
    ids=["last", "first", "length", "type", "shape", "transform", "class", "nest", "subset"],
)
def test_other_data_have_another_name(other: Any) -> None:
    assert fingerprint(other) != fingerprint(numbers(1, 2, 3))


def test_subsets_are_named_after_who_is_in_them() -> None:
    inner = cast(Any, numbers(5, 6, 5, 6))
    names = [fingerprint(Subset(inner, part)) for part in ([0, 1], [2, 3], [0, 1])]
    assert names[0] == names[2] != names[1]


def test_random_samples_are_refused_a_cache_would_freeze_them() -> None:
    class Dice(Numbers):
        def __getitem__(self, index: int) -> Any:
            return torch.rand(4)

    with pytest.raises(CacheError, match="move the randomness to augment"):
        fingerprint(Dice([0, 0]))


@pytest.mark.parametrize(
    ("dataset", "complaint"),
    [
        (Numbers([]), "empty"),
        (
            PictureArrays(np.zeros((1, 4, 4, 3), np.uint8), np.zeros(1, np.int64), ("a",)),
            "in memory.*leave the cache off",
        ),
    ],
    ids=["empty", "in memory already"],
)
def test_what_needs_no_cache_is_told_so(dataset: Any, complaint: str) -> None:
    with pytest.raises(LoaderError, match=complaint):
        fingerprint(dataset)
