"""Several devices: time over max(longest job, sum / devices), and one trial a device beside it.

A job's step waits a fixed time, as the host waits for a device, so that two cores can stand in for
four devices: what is measured is the schedule, the moves, and the processes' own work.

    fleet   a process a device, jobs move where that pays
    fifo    a process a device, and each takes the next job when it has done one (Tune's rule)
"""

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness.command import Options
from benchmarks.harness.report import Report, Target, format_spread, format_table
from trainers.fleet import Fleet
from trainers.fleet.deciding.events import Departed, Event, Finished, Planned
from trainers.fleet.deciding.fleet_state import FleetState

STEP = 0.05
"""Seconds that a step waits for its device."""
QUIET = {
    "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "max_epochs": 1,
}  # fmt: skip


class Waiting(L.LightningModule):
    """Its device has a step's time; its host has next to nothing."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


@dataclass(frozen=True, slots=True)
class Grid:
    """Jobs on some devices: a table of the design."""

    name: str
    devices: int
    steps: Sequence[int]

    def bound(self, step: float) -> float:
        """The least seconds, if a step takes so many."""
        return step * max(max(self.steps), sum(self.steps) / self.devices)


def grids(smoke: bool) -> list[Grid]:
    if smoke:
        return [Grid("3 jobs, 2 devices", 2, [12, 8, 8])]
    return [
        Grid("5 equal jobs, 2 devices", 2, [320] * 5),
        Grid("13 equal jobs, 4 devices", 4, [240] * 13),
        Grid("12 jobs of sizes 1 to 8, 4 devices", 4, [80 * (n % 8 + 1) for n in range(12)]),
    ]


def loader(steps: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(steps, 4)), batch_size=1)


def step_alone(steps: int = 100) -> float:
    """The seconds of a step with what Lightning does around it, in one job alone."""
    stamps: list[float] = []

    class Stamps(L.Callback):
        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            stamps.append(perf_counter())

    trainer = L.Trainer(**QUIET, accelerator="cpu", devices=1, callbacks=[Stamps()])
    trainer.fit(Waiting(STEP), loader(steps))
    return (stamps[-1] - stamps[0]) / (len(stamps) - 1)


class FromPlanned:
    """Notes the time from the moment when all jobs are planned to the end of the last one."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._planned: set[str] = set()
        self._begun = (0.0, 0.0)
        self.wall = self.cpu = 0.0
        self.moves = 0

    def __call__(self, state: FleetState, event: Event) -> None:
        if isinstance(event, Planned) and event.job not in self._planned:
            self._planned.add(event.job)
            if len(self._planned) == self._jobs:
                self._begun = perf_counter(), process_time()
        if isinstance(event, Finished):
            self.wall, self.cpu = perf_counter() - self._begun[0], process_time() - self._begun[1]
        if isinstance(event, Departed):
            self.moves += state.jobs[event.job].exit.target is not None


def in_fleet(grid: Grid) -> tuple[float, int]:
    watch = FromPlanned(len(grid.steps))
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(None, ["cpu"] * grid.devices, folder=folder, watch=watch)
        for number, steps in enumerate(grid.steps):
            fleet.add(
                f"job{number}", Waiting(STEP), train=loader(steps), trainer=QUIET, offload=False
            )
        result = fleet.fit()
    assert all(job.state == "finished" for job in result.jobs.values()), result.table()
    return watch.wall, watch.moves


def take_jobs(jobs: Any, together: Any, ended: Any) -> None:
    """Run in the process of a device."""
    together.wait()
    while (steps := jobs.get()) is not None:
        L.Trainer(**QUIET, accelerator="cpu", devices=1).fit(Waiting(STEP), loader(steps))
    ended.put(None)


def fifo(grid: Grid) -> float:
    spawn = multiprocessing.get_context("spawn")
    jobs, ended, together = spawn.Queue(), spawn.Queue(), spawn.Barrier(grid.devices + 1)
    for steps in (*grid.steps, *[None] * grid.devices):
        jobs.put(steps)
    children = [
        spawn.Process(target=take_jobs, args=(jobs, together, ended)) for _ in range(grid.devices)
    ]
    for child in children:
        child.start()
    together.wait()
    begun = perf_counter()
    for _ in children:
        ended.get()
    seconds = perf_counter() - begun
    for child in children:
        child.join()
    return seconds


def measure(options: Options) -> Report:
    smoke, repeats = options.smoke, options.rounds
    report = Report(
        "devices",
        "jobs of several devices end at the lower bound, which one trial a device misses",
        {"seconds of a step": STEP},
    )
    lines = []
    for grid in grids(smoke):
        ours, moves, theirs = [], [], []
        bounds: list[float] = []
        for _ in range(repeats):
            bounds.append(grid.bound(step_alone(10 if smoke else 100)))
            seconds, moved = in_fleet(grid)
            ours.append(seconds / bounds[-1])
            moves.append(moved)
            theirs.append(fifo(grid) / bounds[-1])
            report.rows.append(
                {"grid": grid.name, "fleet": ours[-1], "moves": moved, "fifo": theirs[-1]}
            )
        fleet, other = statistics.median(ours), statistics.median(theirs)
        bound = statistics.median(bounds)
        lines.append([
            grid.name, f"{bound:.1f}", format_spread(ours, ".3f"),
            f"{statistics.median(moves):g}", f"{other:.3f}",
        ])  # fmt: skip
        report.asked.append(Target(f"{grid.name}: fleet over the bound", 1.05, fleet))
    report.tables["time over max(longest, sum / devices)"] = format_table(
        ["grid", "bound s", "fleet", "moves", "FIFO"], lines
    )
    report.remarks.append(
        "Steps wait and compute nothing, on both sides, so that two cores can be four devices."
        " The bound is of the seconds that a step takes in one job alone, in the same round."
        " Time is from the moment when every job has been built and planned; FIFO builds its jobs"
        " within it, which takes a few hundredths of a second each."
    )
    return report
