"""OffloadStrategy with everything resident against plain Lightning: CPU seconds a step.

    round   plain x n | ours x n    n steps of about CHUNK seconds, in another order every time

`trainer.fit` as a user calls it: loader, callbacks, `self.log` and all. The first steps, capture
and plan among them, are not counted. Every loss of every step must be plain Lightning's.
"""

import statistics
from typing import Any

from benchmarks.harness.command import Options
from benchmarks.harness.report import Report, Target, format_spread, format_table, round_ratios
from benchmarks.strategy.nets import OPTIMIZERS, Batch, cases
from benchmarks.strategy.pair import PairJob, TrainingPair

ROUNDS = 7
CHUNK = 0.4
"""Seconds."""
WARM = 3
"""Steps before it is known how long one takes."""


def make(name: str, smoke: bool) -> tuple[Any, list[Batch]]:
    """In a child, after it was seeded."""
    case = cases(smoke)[name]
    return case.net(), [case.batch() for _ in range(8)]


def measure(options: Options) -> Report:
    smoke, repeats, only = options.smoke, options.rounds, options.only
    report = Report(
        "overhead",
        "Claim: with everything resident a step takes plain Lightning's CPU time (<= 10 % more if"
        " that is 6 ms)",
        {"rounds": repeats, "torch threads": 1, "time": "CPU s of the process, median [min, max]"},
    )
    lines = []
    with TrainingPair() as pair:
        for name, case in cases(smoke).items():
            if only and name not in only:
                continue
            for optimizer in OPTIMIZERS:
                row = _one(pair, name, optimizer, repeats, smoke)
                report.rows.append({"setting": case.setting, **row})
                share = round_ratios(row["ours"], row["plain"])
                asked = Target(f"{name}, {optimizer}: x plain", case.most, statistics.median(share))
                report.asked.append(asked)
                lines.append([
                    name, optimizer, f"{row['steps']}",
                    *(format_spread([1e3 * s for s in row[who]]) for who in ("plain", "ours")),
                    format_spread(share, ".3f"), f"{min(row['ours']) / min(row['plain']):.3f}",
                    f"{row['wrong_losses']} + {row['wrong_end']}",
                ])  # fmt: skip
                print(" | ".join(lines[-1]), flush=True)
    wrong = sum(row["wrong_losses"] + row["wrong_end"] for row in report.rows)
    report.asked.append(Target("losses and final states that differ", 0, wrong))
    head = ["model", "optimizer", "steps a turn", "plain ms a step", "ours ms a step",
            "x plain, within a round", "x plain, least of each", "wrong"]  # fmt: skip
    report.tables["CPU time a step"] = format_table(head, lines)
    report.tables["Models"] = format_table(
        ["model", "setting"], [[name, case.setting] for name, case in cases(smoke).items()]
    )
    report.remarks = [
        "Two processes, which step in turns: neither has the other's memory or allocator.",
        "wrong: losses that are not the same to the last bit, and whether parameters, buffers and"
        " optimizer state differ at the end.",
    ]
    return report


def _one(
    pair: TrainingPair, name: str, optimizer: str, repeats: int, smoke: bool
) -> dict[str, Any]:
    pair.begin(PairJob(make, (name, smoke), optimizer))
    seen: dict[str, list[float]] = {"plain": [], "ours": []}
    losses: dict[str, list[str]] = {"plain": [], "ours": []}
    for who in seen:
        losses[who] += pair.step(who, WARM).losses
    took = pair.step("plain", WARM)
    losses["plain"] += took.losses
    losses["ours"] += pair.step("ours", WARM).losses
    steps = 2 if smoke else max(2, round(CHUNK * WARM / took.cpu))
    for number in range(repeats + 1):
        for who in ("plain", "ours") if number % 2 else ("ours", "plain"):
            took = pair.step(who, steps)
            losses[who] += took.losses
            if number:  # the first round warms up
                seen[who].append(took.cpu / steps)
    ends = pair.end()
    wrong = sum(a != b for a, b in zip(losses["plain"], losses["ours"], strict=True))
    return {
        "model": name, "optimizer": optimizer, "steps": steps, **seen, "wrong_losses": wrong,
        "wrong_end": int(ends["plain"].digest != ends["ours"].digest), **ends["ours"].facts,
    }  # fmt: skip
