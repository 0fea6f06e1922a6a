"""One peer without company against plain Lightning that accumulates as many micro-batches."""

import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.harness.command import Options
from benchmarks.harness.report import Report, Target, format_spread, format_table, round_ratios
from benchmarks.swarms.swarm import Nursery, Swarm

LANES, MICRO, WIDTH = 16, 64, 2048
STEPS, SMOKE_STEPS, WARM = 40, 6, 2


def one(folder: Path, nursery: Nursery, steps: int, plain: bool) -> dict[str, float]:
    usual: dict[str, Any] = {
        "steps": steps, "width": WIDTH, "samples": 8192, "lanes": LANES, "serves": False,
        "batch": LANES * MICRO,
    }  # fmt: skip
    if plain:
        usual |= {
            "plain": True, "batch": MICRO, "trainer": {"accumulate_grad_batches": LANES}
        }  # fmt: skip
    with Swarm(folder, nursery, heartbeat=30.0) as swarm:
        result = swarm.peer("one", **usual).result(600)
    every = LANES if plain else 1  # Lightning's batches are micro-batches there.
    found = {}
    for key in ("seconds", "cpu"):
        ends = result[key][every - 1 :: every][WARM:]
        found[key] = statistics.median(later - before for before, later in pairwise(ends))
    return found


def measure(options: Options) -> Report:
    """`repeats`: of both, in turns."""
    steps = SMOKE_STEPS if options.smoke else STEPS
    report = Report(
        "overhead", "the strategy alone costs next to nothing",
        {"lanes": LANES, "samples of a lane": MICRO, "width": WIDTH, "steps": steps},
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as place, Nursery() as nursery:
        for turn in range(options.rounds):
            for plain in (True, False) if turn % 2 else (False, True):
                found = one(Path(place) / f"{turn}{plain}", nursery, steps, plain)
                report.rows.append({"turn": turn, "plain": plain, **found})
    tables = []
    for key, name in (("seconds", "wall"), ("cpu", "CPU")):
        ours = [row[key] for row in report.rows if not row["plain"]]
        theirs = [row[key] for row in report.rows if row["plain"]]
        ratio = round_ratios(ours, theirs)
        tables.append([name, format_spread(ours), format_spread(theirs), format_spread(ratio)])
        report.asked.append(Target(f"{name} time over plain Lightning's", 1.03,
                                  statistics.median(ratio)))  # fmt: skip
    report.tables["Seconds of a step, median of a run"] = format_table(
        ["", "ElasticStrategy", "plain", "ratio"], tables
    )
    return report
