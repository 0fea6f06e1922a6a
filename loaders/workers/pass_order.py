"""The samples of one pass in the order in which they are decoded, and what reading made of them."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

DRAWN_AGAIN = 1 << 20
"""This lies between the serves of a sample and those of its next drawing in the same pass. No
sample has so many serves."""


@dataclass(slots=True, eq=False)
class PassProgress:
    """What the reader found so far at the positions of a pass."""

    ids: NDArray[np.int64]
    """The sample that each position serves: its own, or a replacement for an unreadable one."""
    cached: NDArray[np.bool_]
    """Whether the sample of each position came from the decoded cache."""
    decoded: int = 0
    """This many samples were decoded."""


@dataclass(frozen=True, slots=True, eq=False)
class PassOrder:
    """The samples of one pass, as they were drawn."""

    pass_index: int
    ids: NDArray[np.int64]
    again: NDArray[np.int64] | None = None
    """How often a sampler drew the id of each position earlier in this pass. None: it draws no id
    twice."""
    drawn: str = ""
    """The digest of all ids that a sampler drew. Empty: there is no sampler."""
    progress: PassProgress = field(init=False)

    def __post_init__(self) -> None:
        progress = PassProgress(self.ids.copy(), np.zeros(len(self.ids), dtype=bool))
        object.__setattr__(self, "progress", progress)

    def draws(self, positions: NDArray[np.int64], serves: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number that stands for the serve in the keys of random numbers. It differs where a
        sample is drawn twice in a pass, so that both are augmented differently."""
        return serves if self.again is None else serves + self.again[positions] * DRAWN_AGAIN
