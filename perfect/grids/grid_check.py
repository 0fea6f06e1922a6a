"""Says what a grid would run, without training: `perfect-train grid.yaml --check`.

A fleet in a temporary folder builds and plans jobs, as long as there is memory for them, and ends
there. It builds one of all points whose steps are equal, because the others take as much. No step
is run, and no file is left.
"""

import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from offload.sizes import format_count, format_size
from perfect.config.grid import Grid, Point, why_too_late
from perfect.config.schema import RunConfig, dump_config
from perfect.errors import BuildError
from perfect.grids.grid_fleet import build_fleet, widen
from perfect.report.words import DASH, brief
from trainers.fleet.deciding.fleet_state import FleetState, JobState
from trainers.fleet.deciding.prediction import explain_run

log = logging.getLogger(__name__)


def check_grid(grid: Grid, console: Console) -> int:
    """Print what every job would take, and when all would be done. Return the exit code."""
    widen(console)
    states: list[FleetState] = []
    points = grid.points or (grid.first,)  # a search chooses them in the run
    alike = equal_steps(points)
    with tempfile.TemporaryDirectory(prefix="perfect-check-") as folder:
        firsts = [group[0] for group in alike]
        fleet = build_fleet(grid, Path(folder), lambda state, _: states.append(state), firsts)
        log.info("planning %s", format_count(len(firsts), "job"))
        try:
            plans = {plan.job: plan for plan in fleet.plan()}
        finally:
            fleet.close()
    jobs: dict[str, JobState] = {}
    for group in alike:
        job = states[-1].jobs[group[0].name]
        made = plans.get(job.name)
        for point in group:
            jobs[point.name] = replace(job, name=point.name)
            if made is not None:
                read = made.input and f"{made.input} of seed {point.config.seed}"
                plans[point.name] = replace(made, job=point.name, input=read)
    jobs = {point.name: jobs[point.name] for point in points}
    explanation = explain_run([plans[name] for name in jobs if name in plans], states[-1].settings)
    if grid.fleet.search is not None:
        console.print("a search chooses its points in the run; this is the first one")
    console.print(_table(jobs))
    console.print(Text(explanation), soft_wrap=True)
    failed = [job for job in jobs.values() if job.phase == "failed"]
    for job in failed:
        console.print(
            Text(f"{job.name} would fail: {job.reason or job.exit.why}", style="red"),
            soft_wrap=True,
        )
    if failed:
        return 1
    lengths = [job.step + job.left for job in jobs.values() if job.left]
    if why := why_too_late(grid.fleet.stop, lengths):
        raise BuildError("fleet.stop.first", why)
    return 0


def equal_steps(points: Sequence[Point]) -> list[list[Point]]:
    """Return the points in groups of equal steps and lengths: their complete configurations are
    equal, but for what changes no plan. A key that is not named here keeps points apart, and so
    does every new one."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(repr(_plan_relevant(point.config)), []).append(point)
    return [*groups.values()]


def _plan_relevant(config: RunConfig) -> dict[str, Any]:
    """Return the configuration without what changes no plan. An optimizer reads its learning rate
    at every step, and a schedule only writes it. A seed draws other numbers of the same shapes,
    unless batches have several shapes or a class of the user's own makes something of it."""
    plain = dump_config(config)
    plain["optimizer"]["lr"] = None
    for phase in plain["phases"]:
        phase["lr"] = phase["lr"] is not None
    own_class = config.model.class_path or config.data.class_path
    if own_class is None and config.data.name != "lines":
        plain["seed"] = None
    return plain


def _table(jobs: Mapping[str, JobState]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("job", "steps", "a step", "host memory", "its plan"):
        left = column in ("job", "its plan")
        table.add_column(column, justify="left" if left else "right")
    for job in jobs.values():
        memory = job.plan.memory
        cells = [
            job.name,
            f"{job.step + job.left:,}" if job.left else DASH,
            brief(job.step_seconds) if job.step_seconds else DASH,
            DASH if memory is None else format_size(memory.host_bytes),
            job.plan.about or job.why or job.phase.replace("_", " "),
        ]
        table.add_row(*map(Text, cells))
    return table
