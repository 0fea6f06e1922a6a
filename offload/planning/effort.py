"""Which plans a search tries, by the size of the graph. Pure."""

from dataclasses import dataclass

from offload.planning.policies import DROPS

FURTHER = ((256, 16, 0), (256, 16, 256))
"""Horizons for steps in which the pieces of several micro-batches take turns: the next weight is
needed a hundred tasks later."""
OTHERS = ((16, 0, 0), (256, 0, 256), (64, 16, 0))


@dataclass(frozen=True, slots=True)
class Effort:
    """Which plans are tried."""

    shares: tuple[float, ...] = (0.95, 0.8, 0.6, 0.3, 0.0)
    """Shares of the room for resident weights."""
    drops: tuple[int, ...] = DROPS
    """Tried with each share. Values of `DROPS` that are missing here are tried with the best
    shares."""
    horizons: tuple[tuple[int, int, int], ...] = (*FURTHER, *OTHERS)
    """Tasks placed ahead, with eviction, and with dropping; tried with the best share."""
    recomputations: int = 5


EFFORTS = (
    (5_000, Effort()),
    (20_000, Effort((0.95, 0.6, 0.3, 0.0), DROPS[:1], horizons=FURTHER, recomputations=2)),
    (1 << 60, Effort((0.95, 0.3), DROPS[:1], horizons=(), recomputations=1)),
)
"""By the largest number of tasks."""
