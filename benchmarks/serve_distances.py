"""How far two serves of one sample lie apart: the distribution, in batches, for typical settings.

    python benchmarks/serve_distances.py [--samples N] [--batch-size N]
                                                        OUT/DATE_serve_distances.md and .json

It is a property of the order alone (`loaders/order/reuse.py`), so nothing is decoded, no clock is
read, and another machine prints the same. "Away from the drain": the pass ends when the last
samples have been served as often as the others, and there they come closer together.
"""

import argparse
import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaders.order.reuse import MODES, Mode, ReuseBuffer

RESULTS = Path(__file__).parent / "results"
CLAIM = "How far two serves of one sample lie apart"
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


def row(plan: ReuseBuffer) -> dict[str, Any]:
    """What is shown of a setting. Without a number: all of the pass drains."""
    found = distances(plan)
    steady = found.away_from_the_drain
    shown: dict[str, Any] = {
        "mode": plan.mode, "reuse": plan.reuse, "buffer, batches": plan.buffer_batches
    }  # fmt: skip
    for name, share in (("least", 0), ("5 %", 5), ("median", 50), ("95 %", 95), ("most", 100)):
        shown[name] = round(float(np.percentile(steady, share))) if len(steady) else None
    return {**shown, "least, drain": int(found.batches.min())}


def main() -> None:
    from offloading.report import Report, measure_and_print, table  # a test needs no report

    parser = argparse.ArgumentParser(description="Distances between two serves of a sample")
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    given = parser.parse_args()

    def measure() -> Report:
        size = given.samples, given.batch_size
        rows = [
            row(ReuseBuffer(*size, reuse, buffer, mode, True, False, seed=(0,)))
            for mode, reuse, buffer in SETTINGS
        ]
        lines = [["all drains" if v is None else str(v) for v in one.values()] for one in rows]
        setting = {"samples": given.samples, "batch": given.batch_size}
        tables = {"Distances, in batches": table(list(rows[0]), lines)}
        return Report("serve_distances", CLAIM, setting, tables, rows=rows)

    measure_and_print(measure, given.out / f"{given.date}_serve_distances")


if __name__ == "__main__":
    main()
