"""What a DataLoader says about what to serve and how, and what is refused."""

import functools
import multiprocessing
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.numbered_samples import Made
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from loaders import ReuseLoader
from loaders.arguments import Adopted, from_dataloader
from loaders.errors import LoaderError

TEN: Any = list(range(10))


def adopted(**options: Any) -> Adopted:
    return from_dataloader(DataLoader(TEN, **{"num_workers": 1, **options}))


# ---- a DataLoader -------------------------------------------------------------------------------


class Own(Dataset[int]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index


def test_without_workers_a_thread_reads_ahead_only_what_is_known_to_be_safe() -> None:
    assert from_dataloader(DataLoader(TEN)).workers.count == 1
    assert from_dataloader(DataLoader(Own())).workers.count == 0
    assert from_dataloader(DataLoader(Own())).notes == ()
    assert from_dataloader(DataLoader(Own(), num_workers=2)).workers.count == 2


@pytest.mark.draws_seeds
@pytest.mark.parametrize("of", ["loader", "sampler"])
def test_a_seed_is_drawn_from_the_generator(of: str) -> None:
    generator = torch.Generator().manual_seed(77)

    def drawn() -> int:
        if of == "loader":
            loader = DataLoader(TEN, shuffle=True, generator=generator)
        else:
            loader = DataLoader(TEN, sampler=RandomSampler(TEN, generator=generator))
        before = torch.random.get_rng_state()
        with ReuseLoader.from_dataloader(loader, reuse=1) as made:
            assert torch.equal(torch.random.get_rng_state(), before)
            return made.seed

    first, second = drawn(), drawn()
    assert first != second
    generator.manual_seed(77)
    assert (drawn(), drawn()) == (first, second)


@pytest.mark.parametrize(
    ("sampler", "shuffle"),
    [
        (RandomSampler(TEN), True),
        (SequentialSampler(TEN), False),
        (RandomSampler("0123456789"), True),
    ],
)
def test_an_order_that_we_know_ourselves_is_no_sampler(sampler: Any, shuffle: bool) -> None:
    found = adopted(sampler=sampler)
    assert (found.shuffle, found.sampler) == (shuffle, None)


class Reversed(SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self) - 1, -1, -1))


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(TEN, replacement=True),
        RandomSampler(TEN, num_samples=4),
        RandomSampler(TEN, num_samples=20),
        RandomSampler([1, 2]),
        SequentialSampler([1, 2]),
        Reversed(TEN),
        WeightedRandomSampler([1.0] * 10, 5),
        SubsetRandomSampler([1, 2, 3]),
        [3, 1, 2],
        DistributedSampler([1, 2, 3], num_replicas=2, rank=0),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_any_other_sampler_is_kept(sampler: Any) -> None:
    found = adopted(sampler=sampler, batch_size=2, drop_last=True)
    assert found.sampler is sampler
    assert (found.shuffle, found.rank) == (False, None)
    assert (found.batch_size, found.drop_last) == (2, True)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_distributed_sampler_says_who_of_how_many(shuffle: bool) -> None:
    sampler = DistributedSampler(TEN, num_replicas=5, rank=3, shuffle=shuffle, seed=9)
    found = adopted(sampler=sampler, generator=torch.Generator())
    assert (found.shuffle, found.rank, found.seed) == (shuffle, (3, 5), 9)
    assert (found.sampler, found.notes) == (None, ())


def test_a_tail_that_a_distributed_sampler_drops_is_noted() -> None:
    dropping = DistributedSampler(TEN, num_replicas=4, rank=0, drop_last=True)
    assert "DistributedSampler(drop_last=True)" in "".join(adopted(sampler=dropping).notes)
    even = DistributedSampler(TEN, num_replicas=5, rank=0, drop_last=True)
    assert adopted(sampler=even).notes == ()


class OwnBatches(BatchSampler):
    pass


class OwnWay(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([])


class StatefulDataLoader(DataLoader[Any]):
    """As torchdata's: it is known by the module that defines it."""

    __module__ = "torchdata.stateful_dataloader.stateful_dataloader"
    __iter__ = OwnWay.__iter__


class StatefulBatches(BatchSampler):
    __module__ = "torchdata.stateful_dataloader.sampler"


def test_a_dataloader_of_torchdata_is_taken_over_but_for_its_state() -> None:
    theirs = StatefulDataLoader(
        TEN, batch_sampler=StatefulBatches(RandomSampler(TEN), 4, True), num_workers=1
    )
    found = from_dataloader(theirs)
    assert (found.batch_size, found.shuffle, found.drop_last) == (4, True, True)
    [note] = found.notes
    assert note == "its load_state_dict has no effect: ReuseLoader has a state_dict of its own"


def start_worker(_: int) -> None: ...


@pytest.mark.parametrize(
    ("make", "kind", "complaint"),
    [
        (lambda: TEN, TypeError, "not a list: give its data set to ReuseLoader"),
        (lambda: DataLoader(TEN, batch_size=None), LoaderError, r"batch_size=None.*\.batched\(\)"),
        (
            lambda: DataLoader(TEN, batch_sampler=OwnBatches(SequentialSampler(TEN), 2, False)),
            LoaderError,
            r"has a batch_sampler \(OwnBatches\), but reuse",
        ),
        (lambda: DataLoader(TEN, batch_sampler=[[1, 2]]), LoaderError, r"a batch_sampler \(list\)"),
        (lambda: OwnWay(TEN), LoaderError, "OwnWay has an __iter__ of its own"),
    ],
    ids=["list", "no batch", "batches", "list of batches", "own"],
)
def test_what_cannot_be_taken_over_is_refused(
    make: Any, kind: type[Exception], complaint: str
) -> None:
    with pytest.raises(kind, match=complaint):
        from_dataloader(make())


def test_a_multiprocessing_context_says_how_processes_start() -> None:
    assert adopted(multiprocessing_context="spawn").workers.start_method == "spawn"
    context = multiprocessing.get_context("forkserver")
    assert adopted(multiprocessing_context=context).workers.start_method == "forkserver"
    assert adopted().workers.start_method is None


def test_what_workers_begin_with_has_no_effect_without_workers() -> None:
    found = from_dataloader(DataLoader(TEN, worker_init_fn=start_worker))  # type: ignore[arg-type]
    assert found.workers.init is None
    assert "worker_init_fn has no effect with num_workers=0" in "".join(found.notes)


def test_lightnings_seeding_of_workers_is_no_reason_to_refuse() -> None:
    from lightning.fabric.utilities.seed import pl_worker_init_function

    init = functools.partial(pl_worker_init_function, rank=0)
    assert "Lightning" in "".join(adopted(worker_init_fn=init).notes)


# ---- what is served then ------------------------------------------------------------------------


SAMPLES, BATCH = 14, 4


def ids_of(loader: ReuseLoader, passes: int = 1) -> list[list[int]]:
    with loader:
        return [[i for _, ids in loader for i in ids.tolist()] for _ in range(passes)]


NUMBERED: Any = Made(SAMPLES, lambda i: (torch.full((3, 2, 2), i, dtype=torch.uint8), i))
"""Each sample says which it is."""
TENSORS = TensorDataset(torch.arange(SAMPLES * 3).view(SAMPLES, 3), torch.arange(SAMPLES))


def adopt(reuse: int = 1, **how: Any) -> ReuseLoader:
    return ReuseLoader.from_dataloader(DataLoader(NUMBERED, BATCH, **how), reuse=reuse)  # type: ignore[arg-type]


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


def test_arguments_of_ones_own_win() -> None:
    loader = ReuseLoader.from_dataloader(DataLoader(TENSORS, BATCH), reuse=2, batch_size=7, seed=9)
    with loader:
        assert loader.seed == 9
        assert [len(batch[0]) for batch in loader] == [7] * 4
