"""Laws of the decoded cache: what comes out is what went in, nothing leaves, the limit holds."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.products import examples

from loaders.cache.cache import DecodedCache, RamCache
from loaders.cache.disk_cache import DiskCache

law = settings(
    max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
Kind = Literal["ram", "disk"]
KINDS: tuple[Kind, ...] = ("ram", "disk")

TENSOR_TYPES = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64,
]  # fmt: skip
ARRAY_TYPES = ["u1", "<i2", ">i4", "u4", "i8", "?", "<f2", ">f4", "f8", "c16", "S3", "<U2", "M8[s]"]

shapes = st.lists(st.integers(0, 4), max_size=4)
plain = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Any type, shape and layout: transposed, with gaps, backwards, repeated."""
    shape, kind = draw(shapes), np.dtype(draw(st.sampled_from(ARRAY_TYPES)))
    wide = [2 * n for n in shape]
    count = int(np.prod(wide)) * kind.itemsize
    raw = np.random.default_rng(draw(st.integers(0, 99))).integers(1, 110, count, np.uint8)
    if kind.kind == "U":  # not every four bytes are a letter
        raw = np.array([f"{n % 100:02}" for n in range(int(np.prod(wide)))], kind)
        array = raw.reshape(wide)
    else:
        array = raw.view(kind).reshape(wide)
    steps = [draw(st.sampled_from([1, 2, -1])) for _ in shape]
    array = array[(*(slice(None, None, step) for step in steps), ...)]
    array = array[(*(slice(0, n) for n in shape), ...)]
    array = array.transpose(draw(st.permutations(range(array.ndim))))
    if draw(st.booleans()):
        array = np.broadcast_to(array, (2, *array.shape))
    return array


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(shapes)
    numbers = torch.randint(0, 200, [2 * n for n in shape])
    tensor = numbers.to(draw(st.sampled_from(TENSOR_TYPES)))
    tensor = tensor[tuple(slice(0, 2 * n, draw(st.sampled_from([1, 2]))) for n in shape)]
    tensor = tensor.permute(draw(st.permutations(range(tensor.ndim))))
    if draw(st.booleans()):
        tensor = tensor[None].expand(3, *tensor.shape)
    return tensor.conj() if tensor.is_complex() and draw(st.booleans()) else tensor


scalars = st.sampled_from(
    [np.float32(1.5), np.int64(-3), np.uint8(7), np.bool_(True), np.float64("nan"), np.str_("ab")]
)
samples = st.lists(plain | arrays() | tensors() | scalars, max_size=6)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        as_bits = a.dtype == b.dtype and a.shape == b.shape
        return as_bits and torch.equal(a.nan_to_num(), b.nan_to_num())
    if isinstance(a, np.ndarray | np.generic):
        alike = a.dtype == b.dtype and a.shape == b.shape
        return alike and np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()
    return repr(a) == repr(b)


def outer_first(strides: Any, shape: Any) -> list[int]:
    """Dimensions that have an order in memory, outermost first."""
    real = [d for d in range(len(shape)) if shape[d] > 1]
    return sorted(real, key=lambda d: -abs(strides[d]))


def layout(leaf: Any) -> list[int]:
    if isinstance(leaf, torch.Tensor):
        return outer_first(leaf.stride(), leaf.shape)
    return outer_first(leaf.strides, leaf.shape)


@contextmanager
def a_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def open_in(folder: Path, kind: Kind, limit: int = 2**30, writer: int = 0) -> DecodedCache:
    if kind == "ram":
        return RamCache(limit)
    return DiskCache(folder, limit, "data-of-today", writer)


def picture(sample_id: int, size: int) -> list[Any]:
    row = np.random.default_rng(sample_id).integers(0, 256, size, np.uint8)
    return [torch.from_numpy(row), sample_id]


def holds(cache: DecodedCache, sample_id: int, size: int) -> bool:
    found = cache.read(sample_id)
    return found is not None and all(map(same, found, picture(sample_id, size)))


def taken(folder: Path) -> int:
    """Bytes of records and of indexes; a data file ends in a hole of its index's size."""
    return sum(path.stat().st_size for path in folder.rglob("*.data"))


@pytest.mark.parametrize("kind", KINDS)
@law
@given(leaves=st.lists(samples, min_size=1, max_size=4))
def test_what_comes_out_is_what_went_in(kind: Kind, leaves: list[list[Any]]) -> None:
    with a_folder() as folder:
        with open_in(folder, kind) as cache:
            for sample_id, sample in enumerate(leaves):
                assert cache.offer(sample_id, sample)
                assert not cache.offer(sample_id, sample)
            assert cache.entries == len(leaves)
            for sample_id, sample in enumerate(leaves):
                check(cache.read(sample_id), sample)
        if kind == "ram":
            return
        for writer in (0, 7):  # its own next run, and another rank's
            with open_in(folder, kind, writer=writer) as cache:
                assert cache.entries == len(leaves)
                for sample_id, sample in enumerate(leaves):
                    check(cache.read(sample_id), sample)


def check(found: list[Any] | None, sample: list[Any]) -> None:
    assert found is not None
    assert len(found) == len(sample)
    for got, given_in in zip(found, sample, strict=True):
        assert same(got, given_in), (got, given_in)
        if isinstance(got, np.ndarray):
            assert not got.flags.writeable
        if isinstance(got, np.ndarray | torch.Tensor):
            assert np.prod(got.shape) == 0 or layout(got) == layout(given_in)


@pytest.mark.parametrize("kind", KINDS)
@law
@given(
    limit=st.integers(1, 20_000),
    offers=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3_000)), max_size=40),
)
def test_nothing_leaves_and_nothing_goes_above_the_limit(
    kind: Kind, limit: int, offers: list[tuple[int, int]]
) -> None:
    with a_folder() as folder:
        kept: dict[int, int] = {}
        with open_in(folder, kind, limit) as cache:
            for sample_id, size in offers:
                if cache.offer(sample_id, picture(sample_id, size)):
                    assert sample_id not in kept
                    kept[sample_id] = size
                assert cache.nbytes <= limit
                assert cache.entries == len(kept)
                assert all(holds(cache, i, n) for i, n in kept.items())
            assert cache.nbytes >= sum(kept.values())
        if kind == "ram":
            assert cache.nbytes == 0
            return
        assert taken(folder) == cache.nbytes <= limit
        with open_in(folder, kind, limit) as again:
            assert again.nbytes <= limit
            assert again.entries == len(kept)
            assert all(holds(again, i, n) for i, n in kept.items())


@law
@given(
    limit=st.integers(2_000, 20_000),
    offers=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(0, 2_000)), max_size=30
    ),
)
def test_ranks_that_live_together_keep_one_limit_and_find_each_others_samples(
    limit: int, offers: list[tuple[int, int, int]]
) -> None:
    with a_folder() as folder:
        ranks = [open_in(folder, "disk", limit, writer) for writer in range(3)]
        kept: dict[int, int] = {}
        for rank, sample_id, size in offers:
            # (Two ranks may keep one sample, if none has looked what the other has done.)
            if sample_id not in kept and ranks[rank].offer(sample_id, picture(sample_id, size)):
                kept[sample_id] = size
        for rank in ranks:
            rank.refresh()
            assert rank.entries == len(kept)
            assert rank.nbytes <= limit
            assert all(holds(rank, i, n) for i, n in kept.items())
        for rank in ranks:
            rank.close()
        assert taken(folder) <= limit
        with open_in(folder, "disk", limit, writer=9) as later:
            assert later.entries == len(kept)
            assert all(holds(later, i, n) for i, n in kept.items())


@law
@given(cut=st.data())
def test_an_index_or_data_cut_anywhere_serves_a_part_of_what_was_there_and_goes_on(
    cut: st.DataObject,
) -> None:
    sizes = {i: 100 * i for i in range(8)}
    with a_folder() as folder:
        with open_in(folder, "disk") as cache:
            assert all(cache.offer(i, picture(i, n)) for i, n in sizes.items())
        for path in sorted(folder.rglob("writer-0.*")):
            with path.open("r+b") as file:
                file.truncate(cut.draw(st.integers(0, path.stat().st_size)))
        with open_in(folder, "disk") as cache:
            left = {i for i, n in sizes.items() if holds(cache, i, n)}
            assert cache.entries == len(left)
            for i, n in sizes.items():
                assert cache.offer(i, picture(i, n)) == (i not in left)
            assert all(holds(cache, i, n) for i, n in sizes.items())
        with open_in(folder, "disk") as cache:
            assert all(holds(cache, i, n) for i, n in sizes.items())
            assert cache.entries == len(sizes)


@law
@given(where=st.data())
def test_a_byte_flipped_anywhere_never_gives_other_pixels(where: st.DataObject) -> None:
    sizes = {i: 50 * i for i in range(6)}
    with a_folder() as folder:
        with open_in(folder, "disk") as cache:
            assert all(cache.offer(i, picture(i, n)) for i, n in sizes.items())
        path = (
            folder
            / "data-of-today"
            / where.draw(st.sampled_from(["writer-0.data", "writer-0.index"]))
        )
        data = bytearray(path.read_bytes())
        data[where.draw(st.integers(0, len(data) - 1))] ^= 1 << where.draw(st.integers(0, 7))
        path.write_bytes(data)
        for _ in range(2):  # the second run finds it mended
            with open_in(folder, "disk", writer=1) as cache:
                for i, n in sizes.items():
                    found = cache.read(i)
                    assert found is None or all(map(same, found, picture(i, n)))
                    assert found is not None or cache.offer(i, picture(i, n))
                    assert holds(cache, i, n)


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
    with RamCache(2**20) as cache:
        assert not cache.offer(5, [leaf, 1])
        assert not cache.offer(6, [leaf, 1])
        assert cache.read(5) is None
        assert cache.entries == cache.nbytes == 0
    [record] = caplog.records
    assert "sample 5 and others like it are not kept" in record.message
    assert type(leaf).__name__ in record.message


def test_a_sample_that_fills_the_cache_to_its_last_byte_fits_and_a_byte_more_does_not() -> None:
    sample = [torch.zeros(1_000, dtype=torch.uint8)]
    with RamCache(2**20) as roomy:
        assert roomy.offer(0, sample)
        needed = roomy.nbytes
    with RamCache(needed) as just_enough, RamCache(needed - 1) as too_small:
        assert just_enough.offer(0, sample)
        assert not too_small.offer(0, sample)
        assert (just_enough.nbytes, too_small.nbytes) == (needed, 0)
