"""The jobs of a grid, and the fleet or the search that trains them."""

import io
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table
from rich.text import Text

from perfect.assembly.berth import berth_in_fleet
from perfect.assembly.phase_plan import build_phases
from perfect.commands.training import train_run
from perfect.config.grid import Grid, Point
from perfect.config.grid_schema import FleetConfig
from perfect.config.schema import RunConfig, dump_config
from perfect.errors import BuildError, Interrupted, RunError, RunFailed
from perfect.report.results import Run, read_run
from perfect.report.words import DASH, duration, percent
from perfect.runs.folder import RunFolder
from trainers.fleet import Fleet, FleetResult
from trainers.fleet.deciding.halving import Halving, StopRule
from trainers.fleet.fleet_run import Watch
from trainers.fleet.hosting.device_process import PROGRAM
from trainers.fleet.jobs.job_turns import STOPPED, JobLeft
from trainers.fleet.jobs.seat import Seat
from trainers.fleet.search import optuna_pruner_of, optuna_search_of
from trainers.fleet.search.optuna_search import AskedTrials

OUTPUT = "output.txt"
log = logging.getLogger(__name__)

OF_THE_FLEET = (OUTPUT, PROGRAM, STOPPED)
"""Files that the fleet and this program put into a job's folder, beside those of the run."""


@dataclass(frozen=True, slots=True)
class GridJob:
    """The program of one point. It can be pickled."""

    config: RunConfig

    def __call__(self, seat: Seat) -> None:
        folder = RunFolder(seat.folder, also=OF_THE_FLEET)
        with job_output(seat.folder) as console:
            if folder.open(dump_config(self.config)) == "completed":
                return  # a kill came between the end of the run and the fleet's note of it
            try:
                train_run(self.config, folder, berth_in_fleet(seat, console))
            except Interrupted as error:
                raise JobLeft(folder.checkpoint_step() or 0) from error
            except BuildError as error:
                errors = [error, *error.others]
                raise RunFailed("; ".join(f"{e.key}: {e.reason}" for e in errors)) from error


@contextmanager
def job_output(folder: Path) -> Iterator[Console]:
    """Yield a console that writes into the folder's file; this thread's logging goes there, too.
    Jobs are threads of one process, so records are told apart by their threads."""
    folder.mkdir(parents=True, exist_ok=True)
    root = logging.getLogger()
    kept = _WhatFits(folder / OUTPUT, "a")
    with io.TextIOWrapper(io.BufferedWriter(kept), encoding="utf-8") as file:
        console = Console(file=file, soft_wrap=True, width=100)
        mine = RichHandler(console=console, show_path=False, show_time=False, show_level=False)
        thread, others = threading.get_ident(), list(root.handlers)
        mine.addFilter(lambda record: record.thread == thread)

        def hush(record: logging.LogRecord) -> bool:
            return record.thread != thread

        for handler in others:
            handler.addFilter(hush)
        root.addHandler(mine)
        try:
            yield console
        finally:
            root.removeHandler(mine)
            for handler in others:
                handler.removeFilter(hush)
    if kept.left_out:
        log.error("%s is incomplete (%s): free some space", folder / OUTPUT, kept.left_out)


class _WhatFits(io.FileIO):
    """Leaves out what does not fit on a full disk: a job goes on without its output."""

    left_out: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.left_out = error
            return len(data)


def job_with(grid: Grid, params: Mapping[str, Any]) -> GridJob:
    """Return the job of a point with a value of each key."""
    return GridJob(grid.point_with([params[axis.key] for axis in grid.axes]).config)


def fit_of(grid: Grid, fleet: Fleet) -> Callable[[], FleetResult]:
    """Return what trains the grid: the fleet, or a search that adds jobs to it."""
    search = grid.fleet.search
    if search is None:
        return fleet.fit
    return optuna_search_of(
        fleet,
        {axis.key: axis.values for axis in grid.axes},
        partial(job_with, grid),
        sampler=search.sampler,
        trials=search.trials,
        at_once=search.at_once,
        seed=search.seed,
        storage=search.storage,
    ).fit


def settings_of(grid: Grid, folder: Path) -> dict[str, dict[str, Any]]:
    """Return the value of each axis, by the names of jobs and axes."""
    if grid.fleet.search is None:
        return {point.name: dict(point.settings) for point in grid.points}
    names = {axis.key: axis.name for axis in grid.axes}
    return {
        job: {names.get(key, key): value for key, value in params.items()}
        for job, params in AskedTrials(folder).read().items()
    }


def build_fleet(grid: Grid, folder: Path, watch: Watch, jobs: Sequence[Point]) -> Fleet:
    """Return the fleet with these jobs, or raise `BuildError` for a key that does not fit."""
    given = grid.fleet
    points = grid.points or (grid.first,)
    for point in points:
        build_phases(point.config)
    fleet = Fleet(
        given.budget,
        devices=_devices(grid),
        host_budget=given.host_budget,
        stop=_rule(given),
        metric=given.metric,
        mode=given.mode,
        quantum=given.quantum,
        hours=given.hours,
        migrate=given.migrate,
        folder=folder,
        watch=watch,
    )
    plain = given.budget is None and any(point.config.offload is None for point in points)
    if plain and fleet.devices[0].type == "cuda":
        raise BuildError(
            "fleet.budget",
            "is missing: on a GPU a fleet must know what a step takes before it runs; give it, or"
            " give offload: {}, which plans each step",
        )
    for point in jobs:
        devices = 1 if point.config.offload is None else point.config.offload.devices
        fleet.add_program(point.name, GridJob(point.config), devices=devices)
    return fleet


def _rule(given: FleetConfig) -> StopRule | None:
    stop, search = given.stop, given.search
    if search is not None and search.pruner is not None and search.every is not None:
        return optuna_pruner_of(search.pruner, given.metric, every=search.every, mode=given.mode)
    if stop is None:
        return None
    return Halving(stop.metric or given.metric, stop.eta, stop.first, stop.mode or given.mode)


def _devices(grid: Grid) -> str | int | Sequence[str | int]:
    """Return what the fleet is given. A CPU may be several devices, each with a process."""
    devices = grid.fleet.devices
    accelerator = grid.first.config.trainer.accelerator
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not torch.cuda.is_available())
    if not on_cpu:
        return devices
    if isinstance(devices, list):
        raise BuildError(
            "fleet.devices", f"is {devices}, numbers of GPUs, but the jobs run on the CPU: give 1"
        )
    return ["cpu"] * (1 if isinstance(devices, str) else devices)


Row = dict[str, Any]


def grid_results(grid: Grid, folder: Path, result: FleetResult, status: str) -> Row:
    """Return what grid.json has: every job, best first."""
    settings = settings_of(grid, folder)
    return {
        "status": status,
        "metric": result.metric,
        "mode": result.mode,
        "axes": [axis.name for axis in grid.axes],
        "fleet": grid.fleet.model_dump(mode="json"),
        "jobs": [
            {
                "name": job.name,
                "settings": settings.get(job.name, {}),
                "state": job.state,
                "step": job.step,
                "metric": _finite(job.metric),
                "seconds": job.seconds,
                "why": job.why,
                "folder": f"jobs/{job.name}",
            }
            for job in result.ranked
        ],
    }


def _finite(value: float | None) -> float | None:
    """JSON has no NaN."""
    return value if value is not None and math.isfinite(value) else None


def failures(result: FleetResult) -> list[str]:
    """Return a sentence for each job that failed."""
    return [
        f"{job.name} failed: {job.why or 'no reason is known'}; {job.folder / 'output.txt'} has"
        " its output"
        for job in result.jobs.values()
        if job.state == "failed"
    ]


def result_table(results: Mapping[str, Any], runs: Mapping[str, Run]) -> Table:
    """Return the jobs, best first, for the terminal. `runs` are by the jobs' names."""
    jobs: Sequence[Row] = results["jobs"]
    judged = [(name, text) for name, text in (("accuracy", percent), ("perplexity", _plain))
              if any(run.number(name) is not None for run in runs.values())]  # fmt: skip
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("", "job", "state", "step", results["metric"] or "metric"):
        table.add_column(column, justify="left" if column in ("job", "state") else "right")
    for name, _ in judged:
        table.add_column(name, justify="right")
    table.add_column("on device", justify="right")
    for number, job in enumerate(jobs, start=1):
        run = runs.get(job["name"])
        cells = [str(number), job["name"], job["state"], f"{job['step']}", _plain(job["metric"])]
        cells += [text(None if run is None else run.number(name)) for name, text in judged]
        cells.append(duration(job["seconds"]))
        style = "red" if job["state"] == "failed" else "bold" if number == 1 else ""
        table.add_row(*map(Text, cells), style=style)
    return table


def widen(console: Console) -> None:
    """Make room for a table. A file has no edge at which its cells must break."""
    if not console.is_terminal:
        console.width = max(console.width, 160)


def _plain(value: float | None) -> str:
    return DASH if value is None else f"{value:.5g}"


def runs_of(folder: Path, results: Mapping[str, Any]) -> dict[str, Run]:
    """Return the run of every job that has begun."""
    runs = {}
    for job in results["jobs"]:
        try:
            runs[job["name"]] = read_run(folder / job["folder"])
        except RunError:
            continue  # it was not built, or never had a turn
    return runs
