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
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from benchmarks.fleet_peers.gpt_jobs import GptSize, configurations
from benchmarks.gpu.part import Found, Job, Row, Rows, Step
from benchmarks.gpu.timing import free
from benchmarks.harness.report import Report, Target, format_spread, format_table, round_ratios
from benchmarks.harness.rounds import alternate_rounds

NAME = "fleet"
CLAIM = "Claim: turns cost at most 3 %, and host tails are hidden under other jobs' steps"
TURNS = 1.03
BUDGET = "70%"
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


@dataclass(frozen=True, slots=True)
class Trained:
    """What jobs became, and how long a step of theirs took."""

    weights: Mapping[str, Mapping[str, torch.Tensor]]
    seconds: float


def _compared(setting: Setting, job: Job) -> Row:
    size, repeats = (TINY, 1) if job.smoke else (setting.size, job.arguments.get("rounds", ROUNDS))
    seen: dict[str, list[float]] = {way: [] for way in setting.ways}
    wrong = 0
    for _, order in alternate_rounds(setting.ways, repeats):
        found: dict[str, Trained] = {}
        for way in order:
            free(job.device)
            found[way] = WAYS[way](setting, size, job.device)
            seen[way].append(found[way].seconds)
        wrong += sum(_wrong(found["serial"], found[way]) for way in setting.ways)
    shape = f"{size.layers} layers, {size.width} wide, {size.batch} x {size.length}, bf16-mixed"
    return {"seconds": seen, "wrong": wrong, "setting": f"{shape}, budget {BUDGET}"}


def _wrong(one: Trained, other: Trained) -> int:
    return sum(
        not torch.equal(value, other.weights[name][key])
        for name, weights in one.weights.items()
        for key, value in weights.items()
    )


# ---- ways ---------------------------------------------------------------------------------------


def _serial(setting: Setting, size: GptSize, device: str) -> Trained:
    import lightning as L

    from trainers import OffloadStrategy

    stamps: list[tuple[float, int]] = []
    weights: dict[str, dict[str, torch.Tensor]] = {}
    for name, given in _jobs(setting, size, device, stamps).items():
        L.seed_everything(given["seed"], verbose=False)
        module = given["module"]()
        strategy = OffloadStrategy(budget=BUDGET, **setting.offload)
        L.Trainer(
            **given["trainer"], strategy=strategy, accelerator="gpu" if device == "cuda" else "cpu",
            devices=1, enable_progress_bar=False, enable_model_summary=False,
        ).fit(module, given["train"]())  # fmt: skip
        weights[name] = {key: value.cpu().clone() for key, value in module.state_dict().items()}
    return Trained(weights, _a_step(stamps))


def _fleet(setting: Setting, size: GptSize, device: str, quantum: int | None = None) -> Trained:
    from trainers.fleet import Fleet

    stamps: list[tuple[float, int]] = []
    devices = ["cuda:0"] if device == "cuda" else ["cpu"]
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(BUDGET, devices, metric="loss", quantum=quantum, folder=folder)
        for name, given in _jobs(setting, size, device, stamps).items():
            fleet.add(name, **given, offload=setting.offload)
        result = fleet.fit()
        for job in result.jobs.values():
            if job.state != "finished":
                raise RuntimeError(f"job {job.name} is {job.state}: {job.why} {job.details}")
        weights = {
            name: torch.load(job.folder / "final.ckpt", map_location="cpu")["state_dict"]
            for name, job in result.jobs.items()
        }
    return Trained(weights, _a_step(stamps))


def _alternate(setting: Setting, size: GptSize, device: str) -> Trained:
    return _fleet(setting, size, device, 1)


WAYS: Mapping[str, Callable[[Setting, GptSize, str], Trained]] = {
    "serial": _serial, "fleet": _fleet, "alternate": _alternate,
}  # fmt: skip


def _jobs(
    setting: Setting, size: GptSize, device: str, stamps: list[tuple[float, int]]
) -> dict[str, dict[str, Any]]:
    """Return arguments of `Fleet.add` by job. `stamps` gets the end of every step."""
    import lightning as L

    from benchmarks.fleet_peers.gpt_jobs import make

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
