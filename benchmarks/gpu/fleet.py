"""Part i: a fleet of jobs on one GPU, beside the same jobs one after the other.

    turns          updates on the device: what do turns cost?
    host updates   updates on the host: what does a job's tail hide under the next job's step?

    serial     each job by an OffloadStrategy of its own
    fleet      turns as long as the fleet chooses
    alternate  turns of one step

A job's first steps capture, plan and measure, on every side; they are left out. An interval between
two steps' ends, whichever jobs they are of, counts for the later one, hand-over included.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import lightning as L

from benchmarks.fleet.turns import BUDGET, Weights, differing, in_fleet, train
from benchmarks.fleet_peers.gpt_jobs import GptSize, configurations, make
from benchmarks.gpu.part import Found, Job, Row, Rows, Step
from benchmarks.gpu.timing import free
from benchmarks.harness.report import Report, Target, format_spread, format_table, round_ratios
from benchmarks.harness.rounds import alternate_rounds

NAME = "fleet"
CLAIM = "Claim: turns cost at most 3 %, and host tails are hidden under other jobs' steps"
TURNS = 1.03
FIRST = 5
"""Steps of each job that are not timed."""
ROUNDS = 2
SIZE = GptSize(layers=12, width=768, heads=12, length=1024, words=50304, batch=16, steps=40)
SMALL = replace(SIZE, layers=4, steps=20)
TINY = GptSize(layers=1, width=16, heads=2, length=8, words=32, batch=2, steps=8)


@dataclass(frozen=True, slots=True)
class Setting:
    jobs: int
    offload: Mapping[str, Any]
    ways: Sequence[str]
    minutes: float
    size: GptSize = SIZE


SETTINGS: Mapping[str, Setting] = {
    "turns; 3 jobs": Setting(3, {}, ("serial", "fleet", "alternate"), 5),
    "host updates; 2 jobs": Setting(2, {"optimizer": "host"}, ("serial", "fleet"), 3),
    "host updates; 4 jobs": Setting(4, {"optimizer": "host"}, ("serial", "fleet"), 5),
}
QUICK: Mapping[str, Setting] = {
    "host updates; 2 small jobs": Setting(2, {"optimizer": "host"}, ("serial", "fleet"), 1, SMALL),
}
"""What quarter.sh has time for."""


def steps(smoke: bool) -> Sequence[Step]:
    if smoke:
        return [Step("gpu.fleet:rows", tuple(SETTINGS))]
    return [
        Step("gpu.fleet:rows", (cell,), minutes=setting.minutes)
        for cell, setting in SETTINGS.items()
    ]


def rows(job: Job) -> Rows:
    for cell in job.cells:
        yield cell, _compared({**SETTINGS, **QUICK}[cell], job)


def _compared(setting: Setting, job: Job) -> Row:
    size, repeats = (TINY, 1) if job.smoke else (setting.size, job.arguments.get("rounds", ROUNDS))
    seen: dict[str, list[float]] = {way: [] for way in setting.ways}
    wrong = 0
    for _, order in alternate_rounds(setting.ways, repeats):
        found: dict[str, Weights] = {}
        for way in order:
            free(job.device)
            found[way], seconds = _trained(way, setting, size, job.device)
            seen[way].append(seconds)
        wrong += sum(differing(found["serial"], found[way]) for way in setting.ways)
    shape = f"{size.layers} layers, {size.width} wide, {size.batch} x {size.length}, bf16-mixed"
    return {"seconds": seen, "wrong": wrong, "setting": f"{shape}, budget {BUDGET}"}


def _trained(way: str, setting: Setting, size: GptSize, device: str) -> tuple[Weights, float]:
    """What the jobs became, and the mean seconds of their steps."""
    stamps: list[tuple[float, int]] = []
    jobs = _jobs(setting, size, device, stamps)
    if way == "serial":
        weights = {name: train(given, device, **setting.offload) for name, given in jobs.items()}
    else:
        quantum = 1 if way == "alternate" else None
        weights = in_fleet(jobs, quantum, device, **setting.offload)
    return weights, _a_step(stamps)


def _jobs(
    setting: Setting, size: GptSize, device: str, stamps: list[tuple[float, int]]
) -> dict[str, dict[str, Any]]:
    """Return arguments of `Fleet.add` by job. `stamps` gets the end of every step."""

    class Stamps(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
            stamps.append((time.perf_counter(), trainer.global_step))

    on_gpu = {"precision": "bf16-mixed", "deterministic": True} if device == "cuda" else {}
    found: dict[str, dict[str, Any]] = {}
    for number, config in enumerate(configurations(setting.jobs, size)):
        given = make(config)
        trainer = {**given["trainer"], **on_gpu, "callbacks": [Stamps()]}
        found[f"job{number}"] = {**given, "trainer": trainer}
    return found


def _a_step(stamps: Sequence[tuple[float, int]]) -> float:
    """Return the mean seconds of a step, all jobs together, without their first ones."""
    took = [later - earlier for (earlier, _), (later, number) in pairwise(stamps) if number > FIRST]
    return statistics.fmean(took)


# ---- report -------------------------------------------------------------------------------------


def report(found: Found) -> Report:
    said = Report(NAME, CLAIM, {"rounds": ROUNDS, "steps not timed": FIRST})
    lines: list[list[str]] = []
    ratios: dict[str, float] = {}
    for cell, row in found.rows.items():
        serial = row["seconds"]["serial"]
        for way, seconds in row["seconds"].items():
            over = statistics.median(round_ratios(seconds, serial))
            ratios[f"{cell}; {way}"] = over
            lines.append([cell, way, format_spread([1e3 * one for one in seconds]), f"{over:.3f}"])
    said.tables["A step, all jobs together"] = format_table(["", "way", "ms", "over serial"], lines)
    said.tables["Jobs"] = format_table(
        ["", "each"], [[c, row["setting"]] for c, row in found.rows.items()]
    )
    for cell in found.cells:
        asked = TURNS if cell.startswith("turns") else 1.0
        said.asked.append(Target(f"{cell}: fleet over serial", asked, ratios.get(f"{cell}; fleet")))
        said.asked.append(Target(f"{cell}: tensors that differ", 0, found.number(cell, "wrong")))
    said.remarks = [
        "Differences are counted against serial, all rounds and ways; torch's deterministic"
        " algorithms are on.",
    ]
    return said
