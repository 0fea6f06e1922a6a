"""The live table of a fleet: the state of every job, and why.

    4 jobs on 1 device; 55 s; about 40 s left
    job    state    step      val_loss  left  device  why
    lr=3   running  60/120    4.71      12 s    31 %
    lr=1   at rung  40/120    5.02      20 s    22 %  waits for lr=3 at step 40

On a terminal the table stays in place. Elsewhere (a log file, CI) a line is printed when a job
changes its state; a job that takes turns stays in one.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trainers.fleet.deciding.events import Event
from trainers.fleet.deciding.fleet_state import FleetState, JobState, Phase, describe_inputs

ORDER: tuple[Phase, ...] = (
    "running", "ready", "starting", "leaving", "at_rung", "lobby", "waiting", "failed", "finished",
    "stopped",
)  # fmt: skip
"""The order of the rows. The last ones are left out if there is no room."""


@dataclass(frozen=True, slots=True)
class BoardRow:
    """A row of the table."""

    job: str
    phase: Phase
    state: str
    step: int
    total: int | None
    metric: float | None
    seconds_left: float | None
    share: float | None
    why: str


def board_rows(state: FleetState) -> list[BoardRow]:
    """Return a row for every job, in the order of adding."""
    together = sum(job.turns.seconds for job in state.jobs.values())
    return [_row(job, together) for job in state.jobs.values()]


def _row(job: JobState, together: float) -> BoardRow:
    planned = job.step + job.left > 0
    known = planned and job.step_seconds > 0 and not job.ended
    return BoardRow(
        job=job.name,
        phase=job.phase,
        state=job.phase.replace("_", " "),
        step=job.step,
        total=job.step + (0 if job.phase == "finished" else job.left) if planned else None,
        metric=job.metric,
        seconds_left=job.left * job.step_seconds if known else None,
        share=job.turns.seconds / together if together else None,
        why=job.reason if job.phase == "failed" else job.why,
    )


def seconds_left(state: FleetState) -> float | None:
    """Return the least seconds until all jobs have ended: those of the longest job, or of all jobs
    on all devices. None while the seconds of a job are unknown."""
    living = [row for row in board_rows(state) if not state.jobs[row.job].ended]
    seconds = [row.seconds_left for row in living]
    known = [each for each in seconds if each is not None]
    if len(known) < len(seconds) or not known:
        return None
    return max(*known, sum(known) / state.settings.devices)


class Board:
    """A context manager. Give its `see` to `Fleet(watch=...)`."""

    def __init__(
        self,
        console: Console | None = None,
        metric: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console(stderr=True)
        self._metric = metric or "metric"
        self._clock = clock
        self._began = clock()
        self._printed: dict[str, tuple[str, str]] = {}
        self._printed_inputs: set[str] = set()
        self._live: Live | None = None

    def __enter__(self) -> "Board":
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def see(self, state: FleetState, _event: Event) -> None:
        """Show the state after an event."""
        if self._live is not None:
            self._live.update(self.page(state))
            return
        for line in self._lines(state):
            self._console.print(Text(line), soft_wrap=True)

    def page(self, state: FleetState) -> Group:
        """Return the table for a terminal."""
        rows = sorted(board_rows(state), key=lambda row: ORDER.index(row.phase))
        room = max(1, self._console.height - 5)
        shown = rows if len(rows) <= room else rows[: room - 1]
        table = Table(box=None, pad_edge=False, header_style="dim")
        for column in ("job", "state", "step", self._metric, "left", "device", "why"):
            table.add_column(
                column, justify="left" if column in ("job", "state", "why") else "right"
            )
        for row in shown:
            style = {"failed": "red", "running": "bold"}.get(row.phase, "")
            table.add_row(*map(Text, self._cells(row)), style=style)
        parts: list[Table | Text] = [Text(self._headline(state)), table]
        if len(shown) < len(rows):
            hidden: dict[str, int] = {}
            for row in rows[len(shown) :]:
                hidden[row.state] = hidden.get(row.state, 0) + 1
            more = ", ".join(f"{count} {name}" for name, count in hidden.items())
            parts.append(Text(f"and {more}"))
        parts += map(Text, _inputs(state))
        return Group(*parts)

    def _headline(self, state: FleetState) -> str:
        jobs, devices = len(state.jobs), state.settings.devices
        left = seconds_left(state)
        parts = [
            f"{jobs} job{'s' * (jobs != 1)} on {devices} device{'s' * (devices != 1)}",
            f"{_duration(self._clock() - self._began)}",
        ]
        if left is not None:
            parts.append(f"about {_duration(left)} left")
        if state.interrupted:
            parts.append("every job writes a checkpoint and stops")
        return "; ".join(parts)

    def _cells(self, row: BoardRow) -> tuple[str, ...]:
        return (
            row.job,
            row.state,
            _steps(row),
            "" if row.metric is None else f"{row.metric:.5g}",
            "" if row.seconds_left is None else _duration(row.seconds_left),
            "" if row.share is None else f"{row.share:.0%}",
            row.why,
        )

    def _lines(self, state: FleetState) -> Iterator[str]:
        """Yield a line for each job whose state has changed."""
        for row in board_rows(state):
            # Jobs take turns every few seconds: a job that waits for its turn is training.
            name = "training" if row.phase in ("ready", "running") else row.state
            why = "" if row.phase in ("ready", "running") else row.why
            if self._printed.get(row.job) == (name, why):
                continue
            first = row.job not in self._printed
            self._printed[row.job] = (name, why)
            if first and row.phase == "waiting" and not why:
                continue  # every job begins like this
            metric = "" if row.metric is None else f", {self._metric} {row.metric:.5g}"
            reason = f": {why}" if why else ""
            after = f"{_duration(self._clock() - self._began)}"
            yield f"{after}  {row.job}  {name}, step {_steps(row)}{metric}{reason}"
        training = [job for job in state.jobs.values() if job.phase in ("ready", "running")]
        if len(training) < sum(not job.ended for job in state.jobs.values()):
            return  # some begin or leave, so the lines would soon be wrong
        for line in _inputs(state):
            if line not in self._printed_inputs:
                self._printed_inputs.add(line)
                yield f"{_duration(self._clock() - self._began)}  {line}"


def _inputs(state: FleetState) -> tuple[str, ...]:
    return describe_inputs(
        {job.name: job.turns.input for job in state.jobs.values() if not job.ended}
    )


def _steps(row: BoardRow) -> str:
    return f"{row.step}" if row.total is None else f"{row.step}/{row.total}"


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f} min"
