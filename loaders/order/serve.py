"""What is served: the samples of a batch, and who stands in the buffer before one.

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
    """Nobody from this position on was served. Whoever is below and does not stand here was served
    to its end."""


EMPTY = Serve(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
