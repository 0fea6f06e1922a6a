"""What test_rank_samplers.py runs: two gloo processes, each with samplers of all kinds.

python rank_samplers.py FOLDER      (writes FOLDER/rank0.json, rank1.json: what each case served)
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from support.gloo_ranks import WORLD, main
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler

from loaders import LoaderError, ReuseLoader

SAMPLES = 101
DATA: Any = list(range(SAMPLES))


class OwnDistributed(DistributedSampler[int]):
    """Draws as torch's does."""


class Sharded(Sampler[int]):
    """This rank's share, by a rank that the sampler was given."""

    def __init__(self, rank: int, num_replicas: int, length: int | None = None) -> None:
        self.rank, self.num_replicas = rank, num_replicas
        self.length = SAMPLES // num_replicas if length is None else length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter([(self.rank + n * self.num_replicas) % SAMPLES for n in range(self.length)])


class Reversed(Sampler[int]):
    """Another sampler backwards."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[int]:
        return reversed(list(self.inner))


def cases(rank: int) -> dict[str, Any]:
    """What makes the loader of each case."""

    def sampled(sampler: Any, batch_size: int = 10, **options: Any) -> ReuseLoader:
        return ReuseLoader(DATA, batch_size, 1, sampler=sampler, workers=1, **options)

    return {
        "torch's own": lambda: sampled(DistributedSampler(DATA, shuffle=False)),
        "a subclass": lambda: sampled(OwnDistributed(DATA, shuffle=False)),
        "a subclass in a DataLoader": lambda: ReuseLoader.from_dataloader(
            DataLoader(DATA, 10, sampler=OwnDistributed(DATA, shuffle=False)), reuse=1
        ),
        "a wrapper": lambda: sampled(DistributedSamplerWrapper(range(SAMPLES), shuffle=False)),
        "a shard": lambda: sampled(Sharded(rank, WORLD)),
        "a shard inside": lambda: sampled(Reversed(Reversed(Sharded(rank, WORLD)))),
        "unrepeated": lambda: sampled(UnrepeatedDistributedSampler(DATA, shuffle=False), 8),
        "unrepeated, one batch less": lambda: sampled(UnrepeatedDistributedSampler(DATA)),
        "all agree": lambda: sampled(RandomSampler(DATA)),
        "no sampler": lambda: ReuseLoader(DATA, 10, 1, workers=1),
        "alone": lambda: sampled(Sharded(rank, WORLD, 10 + 40 * rank), rank=(0, 1)),
        "other orders": lambda: sampled(list(range(rank, SAMPLES, WORLD))[:50]),
        "other lengths": lambda: sampled(Sharded(rank, WORLD, 30 + 20 * rank)),
        "other data": lambda: ReuseLoader(DATA[: 100 - 50 * rank], 10, 1, workers=1),
        "other seeds": lambda: ReuseLoader(DATA, 10, 1, workers=1, seed=rank),
        "one seed given": lambda: ReuseLoader(
            DATA, 10, 1, workers=1, seed=5 if rank == 1 else None
        ),
        "other seeds, a sampler that draws nothing": lambda: sampled(DATA, seed=rank),
        "other seeds for a sampler": lambda: sampled(RandomSampler(DATA), seed=rank),
        "other seeds for shares": lambda: sampled(Sharded(rank, WORLD), seed=rank),
        "other shuffles": lambda: ReuseLoader(DATA, 10, 1, workers=1, shuffle=rank == 0),
        "one rank twice": lambda: ReuseLoader(DATA, 10, 1, workers=1, rank=(0, WORLD)),
        "another world": lambda: sampled(Sharded(0, 1)),
        "another rank": lambda: sampled(Sharded(1 - rank, WORLD)),
        "one is sharded": lambda: sampled(Sharded(0, WORLD) if rank == 0 else DATA[:50]),
    }


def outcome(make: Any) -> Any:
    try:
        with make() as loader:
            served = [batch.tolist() for batch in loader]
            assert len(served) == len(loader)
            return sorted(i for batch in served for i in batch)
    except LoaderError as error:
        return str(error)


def told(rank: int, folder: Path) -> dict[str, Any]:
    return {name: outcome(make) for name, make in cases(rank).items()}


if __name__ == "__main__":
    main(told)
