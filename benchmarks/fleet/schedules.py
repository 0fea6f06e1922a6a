"""Wrong bits in drawn schedules: turns of any length, shared tails, moves, a job that fails.

Two devices with different budgets take turns in one process, and a job that moves goes on from its
checkpoint with another plan (benchmarks/jobs/fleet_jobs.py).
"""

import tempfile
from pathlib import Path

from benchmarks.harness.command import Options
from benchmarks.harness.report import Report, Target
from benchmarks.jobs.fleet_jobs import KINDS, AnySchedule, JobKind, Outcome, alone


def measure(options: Options) -> Report:
    smoke = options.smoke
    count = 2 if smoke else 100
    lone = {name: alone(kind) for name, kind in KINDS.items()}
    report = Report("schedules", "every schedule leaves every bit", {"schedules": count})
    wrong = 0
    for seed in range(count):
        with tempfile.TemporaryDirectory() as folder:
            kinds = {**KINDS, "failing": JobKind(6, fails_at=3)}
            schedule = AnySchedule(kinds, Path(folder), 1000 + seed)
            try:
                schedule.run()
            finally:
                schedule.close()
            assert list(schedule.failed) == ["failing"], schedule.failed
            found = {name: Outcome.of(schedule.modules[name]) for name in KINDS}
        differ = {name: lone[name].differences(found[name]) for name in KINDS}
        wrong += sum(map(bool, differ.values()))
        report.rows.append({"seed": 1000 + seed, "differences": differ})
    report.asked = [Target(f"jobs with other bits than alone, of {count * len(KINDS)}", 0, wrong)]
    report.remarks.append(
        "Compared: weights, optimizer-driven statistics, draws of torch, numpy and Python in every"
        " step, and each pass's mean loss as it was logged."
    )
    return report
