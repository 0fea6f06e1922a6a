"""The ids of a pass in the source's order, of which each rank computes its own share.

    positions of a rank   0     1     2    ...        which ids they are: f(seed, pass), and the
    places of all ranks   r     r+w   r+2w ...        same for all ranks

Every rank serves the same number of ids, for which the first few may be served twice.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import overload

import numpy as np

from loaders.order.keyed_permutation import IntArray, KeyedPermutation


@dataclass(frozen=True, slots=True)
class SourceOrder:
    """Every `step`-th id of an order from its place `start` on: so many as `places` has. Behind its
    end the order begins anew."""

    samples: int
    permutation: KeyedPermutation | None
    """None: the ids come in their own order."""
    places: range

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, positions: IntArray) -> IntArray: ...
    @overload
    def __getitem__(self, positions: slice) -> "SourceOrder": ...
    def __getitem__(self, positions: IntArray | slice) -> "IntArray | SourceOrder":
        if isinstance(positions, slice):
            return replace(self, places=self.places[positions])
        ids = (self.places.start + positions * self.places.step) % self.samples
        return ids if self.permutation is None else self.permutation(ids)

    def __iter__(self) -> Iterator[int]:
        """All ids. It is for a few of them: they are computed at once."""
        return iter(self[np.arange(len(self))].tolist())


def source_order(
    samples: int,
    *,
    seed: int,
    pass_index: int,
    shuffle: bool = True,
    rank: int = 0,
    world_size: int = 1,
) -> SourceOrder:
    """The ids that `rank` serves in pass `pass_index`."""
    whole = samples_per_rank(samples, world_size) * world_size
    permutation = KeyedPermutation(samples, (seed, pass_index)) if shuffle else None
    return SourceOrder(samples, permutation, range(rank, whole, world_size))


def samples_per_rank(samples: int, world_size: int) -> int:
    return -(-samples // world_size)
