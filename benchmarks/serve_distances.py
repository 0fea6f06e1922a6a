"""How far two serves of one sample lie apart: the distribution, in batches, for typical settings.

    python benchmarks/serve_distances.py [--samples N] [--batch-size N]

It is a property of the order alone (`loaders/order/reuse.py`), so nothing is decoded, no clock is
read, and another machine prints the same. "Away from the drain": the pass ends when the last
samples have been served as often as the others, and there they come closer together.
"""

import argparse
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loaders.order.reuse import MODES, Mode, ReuseBuffer

SETTINGS: tuple[tuple[Mode, int, int], ...] = tuple(
    (mode, reuse, buffer) for mode in MODES for reuse in (2, 3, 5) for buffer in (2, 3, 12)
)
"""Mode, reuse, batches in the buffer."""


@dataclass(frozen=True, slots=True)
class Distances:
    """Of all pairs of one serve and the next of the same sample."""

    batches: NDArray[np.int64]
    drained: NDArray[np.bool_]
    """Whether the later one lies where the pass drains: no sample is waiting to be admitted."""

    @property
    def away_from_the_drain(self) -> NDArray[np.int64]:
        return self.batches[~self.drained]


def distances(plan: ReuseBuffer) -> Distances:
    last = np.full(plan.samples, -1)
    served = np.zeros(plan.samples, dtype=np.int64)
    admitted, left = min(plan.capacity, plan.samples), 0
    apart: list[NDArray[np.int64]] = []
    drained: list[NDArray[np.bool_]] = []
    for number, serve in enumerate(plan):
        for nth in np.unique(serve.serves):
            # One after the other: a buffer of one batch may serve a sample twice in a batch.
            who = serve.positions[serve.serves == nth]
            if nth:
                apart.append(number - last[who])
                drained.append(np.full(len(who), admitted + left >= plan.samples))
            last[who] = number
        np.add.at(served, serve.positions, 1)
        left = int((served == plan.reuse).sum())
    whole = [np.empty(0, np.int64), *apart], [np.empty(0, np.bool_), *drained]
    return Distances(np.concatenate(whole[0]), np.concatenate(whole[1]))


def row(plan: ReuseBuffer) -> str:
    found = distances(plan)
    steady = found.away_from_the_drain
    if not len(steady):
        return (
            f"| {plan.mode} | {plan.reuse} | {plan.buffer_batches} | all of it drains | | | | | |"
        )
    low, middle, high = np.percentile(steady, [5, 50, 95])
    return (
        f"| {plan.mode} | {plan.reuse} | {plan.buffer_batches} | {steady.min()} | {low:.0f} |"
        f" {middle:.0f} | {high:.0f} | {steady.max()} | {found.batches.min()} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Distances between two serves of a sample")
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--batch-size", type=int, default=64)
    given = parser.parse_args()
    print(f"{given.samples} samples, batches of {given.batch_size}; distances in batches\n")
    print("| mode | reuse | buffer, batches | least | 5 % | median | 95 % | most | least, drain |")
    print("|---|---|---|---|---|---|---|---|---|")
    for mode, reuse, buffer in SETTINGS:
        plan = ReuseBuffer(
            given.samples, given.batch_size, reuse, buffer, mode, True, False, seed=(0,)
        )
        print(row(plan))


if __name__ == "__main__":
    main()
