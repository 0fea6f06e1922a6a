"""Runs a grid: the fleet, the live table, the records, the report.

Grid -> fleet -> fit -> grid.json -> report.html        the same command goes on after any end
          '- every decision --> board, timeline
"""

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console
from rich.text import Text

from perfect.config.grid import Grid
from perfect.errors import RunError
from perfect.grids.grid_fleet import build_fleet
from perfect.grids.grid_folder import GridFolder
from perfect.grids.grid_results import (
    exit_code,
    failures,
    grid_results,
    result_table,
    runs_of,
    widen,
)
from perfect.grids.grid_search import fit_of
from perfect.grids.timeline import Timeline
from perfect.report.fleet_page import write_fleet_page
from perfect.runs.kept_runs import held
from trainers.fleet import Fleet
from trainers.fleet.deciding.events import Event
from trainers.fleet.deciding.fleet_state import FleetState
from trainers.fleet.keeping.board import Board
from trainers.fleet.keeping.fleet_result import said_left

log = logging.getLogger(__name__)


def run_grid(grid: Grid, out: Path, console: Console) -> int:
    """Train all jobs of the grid, or go on with them. Return the program's exit code."""
    widen(console)
    folder = GridFolder(out)
    folder.open(grid)
    hushed = not log.isEnabledFor(logging.WARNING)  # perfect-train -q
    with held(out), ExitStack() as stack:
        timeline = Timeline(folder.timeline)
        shown = Console(quiet=True, force_terminal=False) if hushed else console
        board = Board(shown, grid.fleet.metric)

        def watch(state: FleetState, event: Event) -> None:
            timeline.see(state, event)
            board.see(state, event)

        fleet = build_fleet(grid, out, watch, grid.points)
        status, code = "failed", 1
        try:
            for part in (_terminated(), _warnings_logged(), timeline, board):
                stack.enter_context(part)
            result = fit_of(grid, fleet)()
            status, code = "completed", 0
            if left := result.unfinished:
                status, again = "out of time", "the same command goes on for as long again"
                _say(console, f"the time is over: {said_left(left, out)}: {again}")
        except KeyboardInterrupt as error:
            status, code = "interrupted", 130
            said = str(error) or f"stopped at once; the same command goes on in {out}"
            _say(console, said)
        finally:
            stack.close()
            _records(grid, folder, fleet, status, console)
    return code or exit_code(fleet.result())


def _records(grid: Grid, folder: GridFolder, fleet: Fleet, status: str, console: Console) -> None:
    """Write grid.json and the report, and say what is in them."""
    result = fleet.result()
    if not result.jobs:
        return  # it was refused before it began
    results = grid_results(grid, folder.path, result, status)
    console.print(result_table(results, runs_of(folder.path, results)))
    for failure in failures(result):
        _say(console, failure, style="red")
    try:
        folder.write(results)
        write_fleet_page(folder.path)
    except (RunError, OSError) as error:  # it must not hide the error that ended the fleet
        _say(console, f"the results could not be written: {error}")
        return
    _say(console, f"report: {folder.report}")


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=True)


@contextmanager
def _terminated() -> Iterator[None]:
    """SIGTERM is Ctrl-C in this block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _warnings_logged() -> Iterator[None]:
    """A warning goes where its job's other messages go, and not into the table."""
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
