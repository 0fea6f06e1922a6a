"""Runs a grid: the fleet, the live table, the timeline, the records, the report.

    Grid -> fleet -> fit -> grid.json -> report.html      the same command continues after any end
              '- every decision --> board, timeline.jsonl

The timeline has a line whenever a job's state changes:

    {"at": 1763887000.2, "job": "lr=1e-3", "phase": "running", "device": 0, "step": 40}
    {"at": 1763887003.9, "job": "lr=1e-3", "phase": "at_rung", "device": 0, "step": 50}
    {"at": 1763887420.0, "program": "ends"}               and "begins", when it continues

It is for the report (perfect/report/fleet_record.py reads it). After a kill only the length of the
last states is unknown, and a full disk loses only the lines that do not fit.
"""

import json
import logging
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from perfect.command_line import handled, print_plain
from perfect.config.grid import Grid
from perfect.errors import FolderError, RunError
from perfect.grids.grid_fleet import (
    build_fleet,
    failures,
    fit_of,
    grid_results,
    result_table,
    runs_of,
    widen,
)
from perfect.report.fleet_page import write_fleet_page
from perfect.runs.folder import check_same, is_folder
from perfect.runs.kept_runs import hold_folder
from perfect.runs.record import write_whole
from trainers.fleet import Fleet
from trainers.fleet.deciding.events import Event
from trainers.fleet.deciding.fleet_state import FleetState
from trainers.fleet.keeping.board import Board
from trainers.fleet.keeping.fleet_result import describe_unfinished
from trainers.record_file import RecordFile

log = logging.getLogger(__name__)

HOW = ("devices", "budget", "host_budget", "quantum", "hours", "migrate")
"""These keys of `fleet` change no job's results, so a grid may be resumed with other ones."""


class GridFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.grid = path / "grid.yaml"
        self.timeline = path / "timeline.jsonl"
        self.results = path / "grid.json"
        self.report = path / "report.html"

    def open(self, grid: Grid) -> None:
        """Make the folder. Raise `FolderError` if this grid may not run here."""
        plain = grid.dump()
        if is_folder(self.path) and self.grid.exists():
            check_same(self.grid, "another grid", plain, _what)
        elif self.path.exists() and any(self.path.iterdir()):
            raise FolderError(
                f"{self.path} is not empty and holds no grid (no grid.yaml): give another --out"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_whole(self.grid, yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))
        except OSError as error:
            raise FolderError(
                f"{self.path} cannot be written ({error}): free some space, or give another --out"
            ) from error

    def write(self, results: Mapping[str, Any]) -> None:
        """Write grid.json, whole or not at all."""
        write_whole(self.results, json.dumps(results, indent=1) + "\n")


def _what(plain: Any) -> Any:
    """Return the grid without the keys that only say how it is made."""
    if not isinstance(plain, dict):
        return plain
    fleet = plain.get("fleet")
    kept = {key: value for key, value in plain.items() if key not in ("fleet", "offload")}
    if isinstance(fleet, dict):
        kept["fleet"] = {key: value for key, value in fleet.items() if key not in HOW}
    return kept


class Timeline:
    """A context manager. Its `see` is for `Fleet(watch=...)`."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._file: RecordFile | None = None
        self._last: dict[str, tuple[str, int | None]] = {}

    def __enter__(self) -> "Timeline":
        self._file = RecordFile(self._path)
        self._write({"program": "begins"})
        return self

    def __exit__(self, *_: object) -> None:
        self._write({"program": "ends"})
        assert self._file is not None
        self._file.close()
        self._file = None

    def see(self, state: FleetState, _event: Event) -> None:
        """Note the jobs that are in another state than before."""
        for job in state.jobs.values():
            now = (job.phase, job.device)
            if self._last.get(job.name) != now:
                self._last[job.name] = now
                self._write(
                    {"job": job.name, "phase": job.phase, "device": job.device, "step": job.step}
                )

    def _write(self, row: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.append_if_it_fits({"at": round(self._clock(), 3), **row})


def run_grid(grid: Grid, out: Path, console: Console) -> int:
    """Train all jobs of the grid, or go on with them. Return the program's exit code."""
    widen(console)
    folder = GridFolder(out)
    folder.open(grid)
    is_quiet = not log.isEnabledFor(logging.WARNING)  # perfect-train -q
    with hold_folder(out), ExitStack() as stack:
        timeline = Timeline(folder.timeline)
        shown = Console(quiet=True, force_terminal=False) if is_quiet else console
        board = Board(shown, grid.fleet.metric)

        def watch(state: FleetState, event: Event) -> None:
            timeline.see(state, event)
            board.see(state, event)

        fleet = build_fleet(grid, out, watch, grid.points)
        status, code = "failed", 1
        try:
            as_ctrl_c = handled(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
            logging.captureWarnings(True)  # where its job's messages go, and not into the table
            stack.callback(logging.captureWarnings, False)
            for part in (as_ctrl_c, timeline, board):
                stack.enter_context(part)
            result = fit_of(grid, fleet)()
            status, code = "completed", 0
            if left := result.unfinished:
                status, again = "out of time", "the same command goes on for as long again"
                print_plain(console, f"the time is over: {describe_unfinished(left, out)}: {again}")
        except KeyboardInterrupt as error:
            status, code = "interrupted", 130
            message = str(error) or f"stopped at once; the same command goes on in {out}"
            print_plain(console, message)
        finally:
            stack.close()
            _write_records(grid, folder, fleet, status, console)
    return code or int(any(job.state == "failed" for job in fleet.result().jobs.values()))


def _write_records(
    grid: Grid, folder: GridFolder, fleet: Fleet, status: str, console: Console
) -> None:
    """Write grid.json and the report, and say what is in them."""
    result = fleet.result()
    if not result.jobs:
        return  # it was refused before it began
    results = grid_results(grid, folder.path, result, status)
    console.print(result_table(results, runs_of(folder.path, results)))
    for failure in failures(result):
        print_plain(console, failure, style="red")
    try:
        folder.write(results)
        write_fleet_page(folder.path)
    except (RunError, OSError) as error:  # it must not hide the error that ended the fleet
        print_plain(console, f"the results could not be written: {error}")
        return
    print_plain(console, f"report: {folder.report}")
