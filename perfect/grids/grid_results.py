"""What came of a grid, as grid.json has it, and as a table for the terminal."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from perfect.config.grid import Grid
from perfect.errors import RunError
from perfect.grids.grid_fleet import settings_of
from perfect.report.results import Run, read_run
from perfect.report.words import DASH, duration, percent
from trainers.fleet import FleetResult, JobResult

Row = dict[str, Any]
"""A job in grid.json."""


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


def exit_code(result: FleetResult) -> int:
    """Return 1 if a job failed."""
    return int(any(job.state == "failed" for job in result.jobs.values()))


def failures(result: FleetResult) -> list[str]:
    """Return a sentence for each job that failed."""
    return [f"{job.name} failed: {_reason(job)}" for job in result.jobs.values()
            if job.state == "failed"]  # fmt: skip


def _reason(job: JobResult) -> str:
    return f"{job.why or 'no reason is known'}; {job.folder / 'output.txt'} has what it said"


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
    found = {}
    for job in results["jobs"]:
        try:
            found[job["name"]] = read_run(folder / job["folder"])
        except RunError:
            continue  # it was not built, or never had a turn
    return found
