"""Three peers of speeds 1 : 2 : 3, 16 lanes a peer: how near their steps are to the ideal.

Lanes sleep, so the machine's cores limit nothing. The ideal step gives each peer lanes by its
measured speed, in fractions: lanes / (sum of the speeds).
"""

import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from offloading.report import Asked, Report, spread, table

from benchmarks.swarms.swarm import Nursery, Swarm
from elastic.setting import Setting

SPEEDS = (1, 2, 3)
LANES = 16 * len(SPEEDS)
SLOWEST = 0.060
"""Seconds of a lane at the slowest peer."""
STEPS, SMOKE_STEPS, WARM = 40, 8, 4


def one(folder: Path, nursery: Nursery, steps: int, slowest: float) -> dict[str, Any]:
    begin = {"do": "hold", "at": "attempt", "step": 0, "until": len(SPEEDS)}
    usual = {
        "steps": steps, "lanes": LANES, "batch": LANES * 4, "samples": 2000, "serves": False,
        "timed": ["_compute"], "faults": [begin],
    }  # fmt: skip
    with Swarm(folder, nursery, heartbeat=30.0) as swarm:
        peers = [swarm.peer(f"p{speed}", **usual, slow=slowest / speed) for speed in SPEEDS]
        results = [peer.result(600) for peer in peers]
    ends = results[0]["seconds"][WARM:]
    step = statistics.median(later - one for one, later in pairwise(ends))
    # What a lane takes beside its sleep is ours to answer for: so the ideal has sleeps only.
    ideal = LANES / sum(speed / slowest for speed in SPEEDS)
    lanes = statistics.median(
        max(several)
        for several in zip(
            *(r["timed"]["_compute"][-steps + WARM :] for r in results), strict=False
        )
    )
    return {"step": step, "lanes": lanes, "ideal": ideal, "share": ideal / step,
            "share of lanes": ideal / lanes}  # fmt: skip


def measure(asked: Setting) -> Report:
    """`repeats`: swarms."""
    steps, slowest = (SMOKE_STEPS, SLOWEST / 10) if asked.smoke else (STEPS, SLOWEST)
    report = Report("speeds", "no peer waits for a slower one", {"lanes": LANES, "steps": steps})
    with tempfile.TemporaryDirectory() as place, Nursery() as nursery:
        for turn in range(asked.repeats):
            report.rows.append(one(Path(place) / str(turn), nursery, steps, slowest))
    report.tables["Peers of speeds 1 : 2 : 3"] = table(
        ["ideal step", "step", "its lanes", "share of the ideal", "of lanes alone"],
        [[spread([row[key] for row in report.rows]) for key in
          ("ideal", "step", "lanes", "share", "share of lanes")]],
    )  # fmt: skip
    share = statistics.median(row["share"] for row in report.rows)
    report.asked = [Asked("of the ideal, the whole step", 0.96, share, at_least=True)]
    return report
