"""The samples of one pass in the order in which they are decoded, and what reading made of them."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from loaders.order.source_order import SourceOrder
from loaders.workers.decode_work import Read

DRAWN_AGAIN = 1 << 20
"""This lies between the serves of a sample and those of its next drawing in the same pass. No
sample has so many serves."""


@dataclass(slots=True, eq=False)
class PassProgress:
    """What the reader found so far at the positions of a pass. It holds what differs from the rule,
    and not one entry for each sample."""

    replaced: dict[int, int] = field(default_factory=dict[int, int])
    """The samples that replace unreadable ones, by their positions."""
    cached: set[int] = field(default_factory=set[int])
    """The positions whose samples came from the decoded cache, until they are counted."""
    decoded: int = 0
    """This many samples were decoded."""


@dataclass(frozen=True, slots=True, eq=False)
class PassOrder:
    """The samples of one pass, as they were drawn."""

    pass_index: int
    drawn_ids: SourceOrder | NDArray[np.int64]
    """The sample that each position has. A sampler draws all of them at once."""
    again: NDArray[np.int64] | None = None
    """How often a sampler drew the id of each position earlier in this pass. None: it draws no id
    twice."""
    drawn: str = ""
    """The digest of all ids that a sampler drew. Empty: there is no sampler."""
    progress: PassProgress = field(default_factory=PassProgress)
    fed: Callable[[Read], Read] | None = None
    """What reads the samples of a stream before they can be decoded."""

    def __len__(self) -> int:
        return len(self.drawn_ids)

    def ids(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples that positions serve: their own, or replacements for unreadable ones."""
        found = self.drawn_ids[positions]
        if replaced := self.progress.replaced:
            own = zip(positions.tolist(), found.tolist(), strict=True)
            found = np.array([replaced.get(*each) for each in own], dtype=np.int64)
        return found

    def strided(self, start: int, step: int) -> "PassOrder":
        """Every `step`-th position from `start` on, with a progress of its own."""
        mine = slice(start, None, step)
        again = None if self.again is None else self.again[mine]
        return PassOrder(self.pass_index, self.drawn_ids[mine], again, self.drawn)

    def count_cached(self, positions: NDArray[np.int64]) -> int:
        """How many of these came from the cache. They are not counted again."""
        counted = self.progress.cached.intersection(positions.tolist())
        self.progress.cached -= counted
        return len(counted)

    def draws(self, positions: NDArray[np.int64], serves: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number that stands for the serve in the keys of random numbers. It differs where a
        sample is drawn twice in a pass, so that both are augmented differently."""
        return serves if self.again is None else serves + self.again[positions] * DRAWN_AGAIN
