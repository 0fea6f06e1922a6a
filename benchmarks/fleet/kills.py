"""A fleet with early stopping, killed at random moments and started again (killed_run.py)."""

import random
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.fleet.killed_run import outcome
from benchmarks.harness.command import Options
from benchmarks.harness.report import Report, Target

SAME = ("jobs", "metrics", "weights")


def measure(options: Options) -> Report:
    smoke = options.smoke
    count = 1 if smoke else 30
    with tempfile.TemporaryDirectory() as folder:
        whole = outcome(Path(folder))
    chance = random.Random(16)
    rows: list[dict[str, Any]] = []
    for _ in range(count):
        moment = chance.randrange(1, whole["events"])
        with tempfile.TemporaryDirectory() as folder:
            found = outcome(Path(folder), [moment])
        differs = [what for what in SAME if found[what] != whole[what]]
        rows.append({"event": moment, "killed": found["kills"] == [moment], "differs": differs})
    same = sum(row["killed"] and not row["differs"] for row in rows)
    report = Report(
        "kills",
        "a killed fleet makes the same decisions and ends with the same weights",
        {"kills": count, "events of a run": whole["events"]},
        rows=rows,
    )
    what = f"of {count} kills: resumed with the same stops, metrics and weights"
    report.asked = [Target(what, count, same, at_least=True)]
    return report
