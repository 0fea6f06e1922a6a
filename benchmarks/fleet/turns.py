"""Twelve small GPTs on one device: a fleet's turns beside four other ways to train them.

serial      each with an OffloadStrategy of its own, one after the other (also Tune's rule of a
            trial a device, without its processes)
fleet       turns as long as the fleet chooses
alternate   turns of one step
processes   a process a model, all at once: the system slices the time (their imports and the
            wait for each other are left out)
Ray Tune    a trial of one job after the other, in a process that it starts once, with the same
            OffloadStrategy (benchmarks/fleet_peers/ray_tune.py; the start of Ray is left out)
"""

import json
import multiprocessing
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.util import find_spec
from multiprocessing.synchronize import Barrier
from time import perf_counter, process_time
from typing import Any

import lightning as L
import torch

from benchmarks.fleet_peers.gpt_jobs import GptSize, configurations, make
from benchmarks.harness.command import Options
from benchmarks.harness.report import Report, Target, format_spread, format_table
from benchmarks.harness.rounds import alternate_rounds
from trainers import OffloadStrategy
from trainers.fleet import Fleet

BUDGET = "70%"
SIZE = GptSize(layers=2, width=128, heads=4, length=64, words=1024, batch=8, steps=80)
TINY = GptSize(layers=1, width=32, heads=2, length=16, words=64, batch=2, steps=4)


Weights = Mapping[str, Mapping[str, torch.Tensor]]
"""By job and name."""


def train(given: Mapping[str, Any], device: str = "cpu", **offload: Any) -> dict[str, torch.Tensor]:
    """Train one job by itself. `given`: arguments of `Fleet.add`."""
    L.seed_everything(given["seed"], verbose=False)
    module = given["module"]()
    strategy = OffloadStrategy(budget=BUDGET, **offload)
    L.Trainer(
        **given["trainer"], strategy=strategy, accelerator="gpu" if device == "cuda" else "cpu",
        devices=1, enable_progress_bar=False, enable_model_summary=False,
    ).fit(module, given["train"]())  # fmt: skip
    return {key: value.cpu().clone() for key, value in module.state_dict().items()}


def in_fleet(
    jobs: Mapping[str, Mapping[str, Any]], quantum: int | None = None, device: str = "cpu",
    **offload: Any,
) -> Weights:  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        devices = ["cuda:0"] if device == "cuda" else ["cpu"]
        fleet = Fleet(BUDGET, devices, metric="loss", quantum=quantum, folder=folder)
        for name, given in jobs.items():
            fleet.add(name, **given, offload=offload)
        result = fleet.fit()
        failed = [job.details for job in result.jobs.values() if job.state != "finished"]
        assert not failed, failed[0]
        return {
            name: torch.load(job.folder / "final.ckpt", map_location="cpu")["state_dict"]
            for name, job in result.jobs.items()
        }


def differing(one: Weights, other: Weights) -> int:
    """Return how many tensors differ."""
    return sum(
        not torch.equal(value, other[name][key])
        for name, weights in one.items()
        for key, value in weights.items()
    )


def alone(config: dict[str, Any], together: Barrier, seconds: Any) -> None:
    """Run in a process: train one model as soon as all processes are ready."""
    together.wait()
    begun = perf_counter()
    train(make(config))
    seconds.put((begun, perf_counter()))


def processes(configs: list[dict[str, Any]]) -> tuple[float, float]:
    """Return wall and CPU seconds from the moment when all processes are ready."""
    spawn = multiprocessing.get_context("spawn")
    together, seconds = spawn.Barrier(len(configs) + 1), spawn.Queue()
    children = [spawn.Process(target=alone, args=(c, together, seconds)) for c in configs]
    for child in children:
        child.start()
    together.wait()
    begun = perf_counter()
    for _ in configs:
        seconds.get()
    wall = perf_counter() - begun
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for child in children:
        child.join()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, cpu


def ray_tune(jobs: int, size: GptSize) -> dict[str, Any]:
    """Return what the peer's own program prints: Ray leaves threads in its process."""
    options = [f"--jobs={jobs}", f"--size={json.dumps(asdict(size))}", f"--budget={BUDGET}"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.fleet_peers.ray_tune", *options],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise AssertionError(f"Ray Tune ended with {done.returncode}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def timed(run: Callable[[], Weights]) -> tuple[Weights, float, float]:
    wall, cpu = perf_counter(), process_time()
    weights = run()
    return weights, perf_counter() - wall, process_time() - cpu


def measure(options: Options) -> Report:
    smoke, repeats = options.smoke, options.rounds
    size = TINY if smoke else SIZE
    configs = configurations(3 if smoke else 12, size)
    jobs = {f"job{number}": make(config) for number, config in enumerate(configs)}
    ways: dict[str, Callable[[], Weights]] = {
        "serial": lambda: {name: train(given) for name, given in jobs.items()},
        "fleet": lambda: in_fleet(jobs),
        "alternate": lambda: in_fleet(jobs, 1),
    }
    train(jobs["job0"])  # what is loaded and compiled once is nobody's
    report = Report(
        "turns",
        "a fleet costs no more than training one after the other",
        {"jobs": len(configs), "steps": size.steps, "budget": BUDGET},
    )
    wrong = 0
    for number, order in alternate_rounds(ways, repeats):
        found = {way: timed(ways[way]) for way in order}
        wrong += sum(differing(found["serial"][0], found[way][0]) for way in ways)
        row: dict[str, Any] = {"round": number}
        for way, (_, wall, cpu) in found.items():
            row |= {f"{way}_wall": wall, f"{way}_cpu": cpu}
        row["processes_wall"], row["processes_cpu_with_imports"] = processes(configs)
        if find_spec("ray"):
            tune = ray_tune(len(configs), size)
            row["ray_tune_wall"] = tune["seconds"] - tune["of them to start Ray"]
            row["ray_tune"] = tune
        report.rows.append(row)
    base = [row["serial_cpu"] for row in report.rows]
    lines = []
    ratios = {}
    for way in ways:
        each = [row[f"{way}_cpu"] / one for row, one in zip(report.rows, base, strict=True)]
        ratios[way] = statistics.median(each)
        cpu = statistics.median(row[f"{way}_cpu"] for row in report.rows)
        wall = statistics.median(row[f"{way}_wall"] for row in report.rows)
        lines.append([way, f"{cpu:.1f}", format_spread(each, ".3f"), f"{wall:.1f}"])
    for way, column in (("processes", "processes_wall"), ("Ray Tune", "ray_tune_wall")):
        walls = [row[column] for row in report.rows if column in row]
        said = f"{statistics.median(walls):.1f}" if walls else "not installed: make .venv/ray"
        lines.append([way, "", "", said])
    report.tables["CPU seconds of all jobs"] = format_table(
        ["way", "CPU s", "over serial", "wall s"], lines
    )
    report.asked = [
        Target("fleet over the jobs one after the other, CPU time", 1.03, ratios["fleet"]),
        Target("tensors with other bits than alone, all rounds and ways", 0, wrong),
    ]
    report.remarks.append(
        "serial is also FIFO on one device. The rows of processes and Ray Tune have wall seconds"
        " alone, from the moment when all have imported torch or Ray has started: two cores share"
        " twelve processes, and Ray's own."
    )
    return report
