"""Which samples this rank serves in each pass: its share of an order that all ranks agree on."""

from dataclasses import dataclass
from typing import Any

import torch

from loaders.sources.datasets import pass_order, samples_per_rank, shared_out
from loaders.sources.samplers import SamplerOrder, drawn_before
from loaders.workers.pass_order import PassOrder


@dataclass(frozen=True, slots=True)
class LoaderRanks:
    """Which of how many processes this one is. What is None is asked of torch.distributed."""

    given_rank: int | None
    given_world_size: int | None

    @property
    def rank(self) -> int:
        if self.given_rank is not None:
            return self.given_rank
        return torch.distributed.get_rank() if _distributed() else 0

    @property
    def world_size(self) -> int:
        if self.given_world_size is not None:
            return self.given_world_size
        return torch.distributed.get_world_size() if _distributed() else 1

    def largest(self, wish: int) -> int:
        """The largest wish of all ranks. Every rank has to call this at the same point."""
        if self.given_world_size is not None or not _distributed():
            return wish
        wishes: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(wishes, wish)
        return max(wishes)


@dataclass(frozen=True, slots=True)
class RankOrder:
    """The samples of this rank, pass by pass."""

    dataset: Any
    sampler: Any
    seed: int
    shuffle: bool
    ranks: LoaderRanks

    @property
    def samples(self) -> int:
        """The number of samples that all ranks together serve in a pass."""
        return len(self.dataset) if self.sampler is None else len(self.sampler)

    @property
    def share(self) -> int:
        """The number of samples that this rank serves in a pass."""
        return samples_per_rank(self.samples, self.ranks.world_size)

    def of_pass(self, pass_index: int) -> PassOrder:
        rank, world_size = self.ranks.rank, self.ranks.world_size
        if self.sampler is None:
            ids = pass_order(
                len(self.dataset),
                seed=self.seed,
                pass_index=pass_index,
                shuffle=self.shuffle,
                rank=rank,
                world_size=world_size,
            )
            return PassOrder(pass_index, ids)
        drawn = SamplerOrder.order(self.sampler, self.seed, pass_index)
        ids = shared_out(drawn, rank, world_size)
        return PassOrder(pass_index, ids, drawn_before(ids))


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
