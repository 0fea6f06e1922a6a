"""The ids of a pass from samplers of any kind: a function of seed and pass, and of nothing else."""

import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from loaders import ReuseLoader
from loaders.errors import LoaderError
from loaders.sources.randomness import seeded_randomness
from loaders.sources.samplers import NamedRank, named_rank, sampler_order

TEN: Any = list(range(10))


class Rolling(Sampler[int]):
    """Draws from everything there is."""

    def __init__(self) -> None:
        self.own = torch.Generator()
        self.numbers = np.random.default_rng()
        self.old = np.random.RandomState()
        self.python = random.Random()
        self.inner = RandomSampler(range(1000), num_samples=2, generator=torch.Generator())
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return 9

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        yield int(torch.randint(10**6, (1,)))
        yield int(torch.randint(10**6, (1,), generator=self.own))
        yield int(np.random.randint(10**6))
        yield int(self.numbers.integers(10**6))
        yield int(self.old.randint(10**6))
        yield random.randrange(10**6)
        yield self.python.randrange(10**6)
        yield from self.inner


@pytest.mark.parametrize(
    "make",
    [
        Rolling,
        lambda: RandomSampler(TEN),
        lambda: RandomSampler(TEN, replacement=True, num_samples=20, generator=torch.Generator()),
        lambda: WeightedRandomSampler([0.1, 1, 2] * 10, 30),
        lambda: SubsetRandomSampler(range(0, 100, 3)),
        lambda: DistributedSampler(range(40), num_replicas=2, rank=1),
    ],
)
def test_a_samplers_order_is_a_function_of_seed_and_pass(make: Any) -> None:
    used = make()
    orders = {
        (seed, p): sampler_order(used, seed, p).tolist() for seed in (0, 1) for p in (0, 1, 2)
    }
    torch.rand(5), np.random.rand(5), random.random()
    for (seed, p), order in reversed(orders.items()):
        assert sampler_order(make(), seed, p).tolist() == order
        assert sampler_order(used, seed, p).tolist() == order
    by_seed_too = type(used) is not DistributedSampler  # which has a seed of its own
    assert len({tuple(order) for order in orders.values()}) == (6 if by_seed_too else 3)


def test_every_number_of_an_order_changes_with_the_pass() -> None:
    first, second = (sampler_order(Rolling(), 0, p) for p in (0, 1))
    assert not (first == second).any()


def test_everybodys_randomness_goes_on_as_if_nobody_had_asked() -> None:
    sampler = Rolling()
    untouched = copy.deepcopy(sampler)
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = list(untouched)
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    sampler_order(sampler, 5, 3)
    assert sampler.epochs == [3]
    assert list(sampler) == expected


def test_a_failure_puts_the_generators_back_too() -> None:
    torch.manual_seed(1)
    before = torch.default_generator.get_state(), random.getstate()
    with pytest.raises(ZeroDivisionError), seeded_randomness(1, 2):
        torch.rand(3), random.random(), 1 // 0
    assert torch.equal(torch.default_generator.get_state(), before[0])
    assert random.getstate() == before[1]


class Lying(Sampler[int]):
    def __init__(self, says: int, gives: Any) -> None:
        self.says = says
        self.gives = gives

    def __len__(self) -> int:
        return self.says

    def __iter__(self) -> Iterator[Any]:
        return iter(self.gives)


@pytest.mark.parametrize(
    ("sampler", "complaint"),
    [
        (Lying(3, iter(int, 1)), "len.. of 3 and gave more in pass 2"),
        (Lying(3, [1]), "len.. of 3 and gave 1 in pass 2"),
        (Lying(1, [[1, 2]]), r"gave \[1, 2\], which is not one id"),
        (Lying(1, [1.5]), r"gave 1\.5, which is not one id"),
        (iter([1]), r"has no len\(\)"),
        (Lying(-1, [1]), r"has no len\(\).*should return >= 0"),
        (Lying(10**12, iter(int, 1)), "len.. of 1000000000000, and all ids of a pass are drawn"),
        (Lying(10**30, iter(int, 1)), r"has no len\(\)"),
        (Lying(0, []), "len.. of 0, .*give one of 1 to"),
    ],
)
def test_a_sampler_that_gives_no_order_is_refused(sampler: Any, complaint: str) -> None:
    with pytest.raises(LoaderError, match=complaint):
        sampler_order(sampler, 0, 2)
    with pytest.raises(LoaderError, match=complaint.replace("pass 2", "pass 0")):
        list(ReuseLoader(TEN, 1, 1, sampler=sampler, workers=0))


# ---- whose share a sampler draws ----------------------------------------------------------------


class Shard(Lying):
    """Names its rank as other libraries' samplers do."""

    def __init__(self, **names: Any) -> None:
        super().__init__(5, range(5))
        self.__dict__.update(names)


class Around(Lying):
    def __init__(self, inner: Any) -> None:
        super().__init__(5, range(5))
        self.inner = inner


class Slotted:
    """No Sampler of torch's, and without a dictionary."""

    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[int]:
        return iter(self.inner)


class ShardedData(list[int]):
    rank, num_replicas = 1, 2


SECOND_OF_TWO = Shard(rank=1, num_replicas=2)


@pytest.mark.parametrize(
    "sampler",
    [
        DistributedSampler(TEN, num_replicas=2, rank=1),
        SECOND_OF_TWO,
        Shard(rank=1, world_size=2),
        Shard(_rank=1, _world_size=2),
        Shard(shard_index=1, num_shards=2),
        Around(SECOND_OF_TWO),
        Around(Slotted(Around(SECOND_OF_TWO))),
        Around([SubsetRandomSampler(TEN), SECOND_OF_TWO]),
        Around({"train": SECOND_OF_TWO}),
        Around(type("Place", (), {"rank": 1, "world_size": 2})()),
    ],
)
def test_a_sampler_that_names_a_rank_or_holds_one_that_does_draws_its_share(sampler: Any) -> None:
    assert named_rank(sampler) == NamedRank(1, 2)


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(TEN),
        WeightedRandomSampler([1.0] * 10, 10),
        Shard(rank=1),
        Shard(rank=None, num_replicas=None),
        Shard(rank=2, num_replicas=2),
        Shard(rank=True, num_replicas=2),
        RandomSampler(ShardedData(TEN)),
        Around(Around(None)),
        TEN,
    ],
)
def test_any_other_sampler_draws_for_all_ranks(sampler: Any) -> None:
    assert named_rank(sampler) is None


def ids_of(loader: ReuseLoader) -> list[int]:
    with loader:
        return sorted(int(i) for batch in loader for i in batch)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_named_share_is_served_whole_by_the_rank_that_it_names(rank: int) -> None:
    def make() -> Any:
        return DistributedSampler(range(40), num_replicas=3, rank=rank, shuffle=False)

    loader = ReuseLoader(range(40), 2, 1, sampler=Around(make()), workers=1)
    assert (loader.rank, loader.world_size, len(loader)) == (rank, 3, 3)
    loader = ReuseLoader(range(40), 2, 1, sampler=make(), workers=1)
    assert ids_of(loader) == sorted(make())


def test_a_rank_that_contradicts_the_loaders_is_refused() -> None:
    loader = ReuseLoader(TEN, 2, 1, sampler=SECOND_OF_TWO, workers=1, rank=(0, 2))
    with pytest.raises(LoaderError, match=r"Shard draws for rank 1 of 2, but .* rank 0 of 2"):
        ids_of(loader)
    alone = ReuseLoader(TEN, 2, 1, sampler=SECOND_OF_TWO, workers=1, rank=(0, 1))
    assert ids_of(alone) == [0, 1, 2, 3, 4]
