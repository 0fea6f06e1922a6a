"""What is served: the samples of a batch; and who stands in the buffer before it, since when.

Positions count the samples of a pass in the source's order (0, 1, ...).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Serve:
    """One batch: its positions, and for each the number (0, 1, ...) of its serve in this pass."""

    positions: IntArray
    serves: IntArray


@dataclass(frozen=True, slots=True)
class Residents:
    """Who stands in the buffer before a batch: as many samples as it has slots, at most."""

    positions: IntArray
    """Those with serves left, below `entered`, ascending."""
    served: IntArray
    """How often each of them was served."""
    first: IntArray
    """The batch that served each of them first. -1: none did."""
    entered: int
    """Nobody from here on was served. Whoever is below and not here was served to its end."""


EMPTY = Serve(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


@dataclass(slots=True)
class BufferAges:
    """The births of who is in the buffer. It remembers nobody else."""

    reuse: int
    born: dict[int, int]
    """The batch that served each sample of the buffer first."""

    @classmethod
    def at_entry(cls, residents: Residents, reuse: int) -> "BufferAges":
        """The ages where a pass is entered."""
        there = residents.served > 0
        positions, first = residents.positions[there].tolist(), residents.first[there].tolist()
        return cls(reuse, dict(zip(positions, first, strict=True)))

    def count(self, batch: int, positions: IntArray, serves: IntArray) -> int:
        """Note a batch; returns the sum of the ages of its samples."""
        self.born.update(dict.fromkeys(positions[serves == 0].tolist(), batch))
        everybody = positions.tolist()
        ages = batch * len(everybody) - sum(map(self.born.__getitem__, everybody))
        for position in positions[serves == self.reuse - 1].tolist():
            del self.born[position]
        return ages
