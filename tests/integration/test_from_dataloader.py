"""A DataLoader that is there already, given to `ReuseLoader.from_dataloader`."""

import io
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from loaders import LoaderError, ReuseLoader

SAMPLES, BATCH = 14, 4


class Numbered:
    """Each sample says which it is."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 2, 2), index, dtype=torch.uint8), index


def ids_of(loader: ReuseLoader, passes: int = 1) -> list[list[int]]:
    with loader:
        return [[i for _, ids in loader for i in ids.tolist()] for _ in range(passes)]


NUMBERED = Numbered()
TENSORS = TensorDataset(torch.arange(SAMPLES * 3).view(SAMPLES, 3), torch.arange(SAMPLES))


def adopt(reuse: int = 1, **how: Any) -> ReuseLoader:
    return ReuseLoader.from_dataloader(DataLoader(NUMBERED, BATCH, **how), reuse=reuse)  # type: ignore[arg-type]


@pytest.mark.parametrize("dataset", [NUMBERED, TENSORS])
def test_a_sequential_dataloader_without_reuse_is_served_batch_for_batch(dataset: Any) -> None:
    theirs = DataLoader(dataset, BATCH)
    with ReuseLoader.from_dataloader(theirs, reuse=1) as loader:
        assert len(loader) == len(theirs)
        for mine, other in zip(loader, theirs, strict=True):
            assert type(mine) is type(other) is list
            assert all(map(torch.equal, mine, other))


def test_a_shuffled_dataloader_is_served_in_another_order_every_pass() -> None:
    first, second = ids_of(adopt(shuffle=True), passes=2)
    assert sorted(first) == sorted(second) == list(range(SAMPLES))
    assert first != second


@pytest.mark.draws_seeds
def test_a_generator_decides_the_order() -> None:
    def order(seed: int) -> list[list[int]]:
        return ids_of(adopt(shuffle=True, generator=torch.Generator().manual_seed(seed)))

    assert order(1) == order(1) != order(2)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_workers_are_taken_over(workers: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "loaders")
    loader = adopt(num_workers=workers)
    assert loader.workers == workers
    assert ("read by the loop itself, nothing ahead" in caplog.text) == (workers == 0)
    assert ids_of(loader) == [list(range(SAMPLES))]


def test_what_a_weighted_sampler_draws_twice_is_served_twice_as_often() -> None:
    sampler = WeightedRandomSampler([1.0, 5.0] * 7, num_samples=40)
    first, second = ids_of(adopt(3, sampler=sampler), passes=2)
    again = ids_of(adopt(3, sampler=sampler))[0]
    assert len(first) == 3 * 40 and first != second
    assert all(times % 3 == 0 for times in Counter(first).values())
    assert sum(i % 2 for i in first) > 1.5 * sum(i % 2 == 0 for i in first)
    assert Counter(again) == Counter(first)  # a function of (seed, pass)


def test_distributed_samplers_share_the_set_as_before() -> None:
    shares = []
    for rank in range(2):
        sampler = DistributedSampler(NUMBERED, 2, rank, seed=5)  # type: ignore[arg-type,var-annotated]
        shares.append(ids_of(adopt(2, sampler=sampler), passes=2))
    for first, second in zip(*shares, strict=True):
        assert len(first) == len(second) == 14
        assert set(first).isdisjoint(second)
        assert Counter(first + second) == dict.fromkeys(range(SAMPLES), 2)


def test_arguments_of_ones_own_win() -> None:
    loader = ReuseLoader.from_dataloader(DataLoader(TENSORS, BATCH), reuse=2, batch_size=7, seed=9)
    with loader:
        assert loader.seed == 9
        assert [len(batch[0]) for batch in loader] == [7] * 4


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(9))


class OwnBatches(BatchSampler):
    pass


@pytest.mark.parametrize(
    ("dataloader", "error", "said"),
    [
        (lambda: DataLoader(TENSORS, batch_size=None), LoaderError, "batch_size=None"),
        (
            lambda: DataLoader(
                TENSORS, batch_sampler=OwnBatches(SequentialSampler(TENSORS), 2, False)
            ),
            LoaderError,
            r"batch_sampler \(OwnBatches\)",
        ),
        (lambda: io.BytesIO(), TypeError, "expected a torch DataLoader, not a BytesIO"),
        (lambda: DataLoader(TENSORS, 15, drop_last=True), ValueError, "batch_size 15 is larger"),
    ],
)
def test_what_cannot_be_taken_over_is_refused(dataloader: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        ReuseLoader.from_dataloader(dataloader())


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterable_data_set_is_served_as_a_stream_in_its_own_order(workers: int) -> None:
    dataloader = DataLoader(Stream(), 2, num_workers=workers)
    with ReuseLoader.from_dataloader(dataloader, reuse=2, buffer_batches=2) as loader:
        assert loader.announcement.adopted is not None
        said = " ".join(loader.announcement.adopted.notes)
        assert ("num_workers=2, and what it says of them, has no effect" in said) == bool(workers)
        for _ in range(2):
            served = [i for batch in loader for i in batch.tolist()]
            assert sorted(served) == sorted([*range(9)] * 2)
        assert loader.workers == max(workers, 1) and not loader.shuffle
