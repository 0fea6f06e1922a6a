"""What the board shows of a fleet: the table of a terminal, the lines of a log."""

import io
from dataclasses import replace

from rich.console import Console

from trainers.fleet.deciding.events import Restarted, StepTimes
from trainers.fleet.deciding.fleet_state import (
    FleetSettings,
    FleetState,
    JobPlan,
    JobState,
    JobTurnState,
)
from trainers.fleet.keeping.board import Board, seconds_left

RUNNING = JobState(
    "lr=3", "running", device=0, step=60, left=60, metric=4.708123,
    plan=JobPlan(times=StepTimes(0.2)), turns=JobTurnState(seconds=30.0),
)  # fmt: skip
AT_RUNG = JobState(
    "lr=1", "at_rung", "waits for lr=3 at step 80", device=0, step=80, left=40, metric=5.02,
    plan=JobPlan(times=StepTimes(0.1)), turns=JobTurnState(seconds=10.0),
)  # fmt: skip
NEW = JobState("lr=9", "waiting")
FAILED = JobState("lr=7", "failed", step=3, left=9, reason="ValueError: no [b]such[/b] key")


def state(*jobs: JobState, devices: int = 1) -> FleetState:
    return FleetState(FleetSettings(devices=devices), {job.name: job for job in jobs})


class Shown:
    """A board over a console that keeps what is written."""

    def __init__(self, terminal: bool = False, height: int = 25) -> None:
        self._file = io.StringIO()
        self.console = Console(
            file=self._file, force_terminal=terminal, width=100, height=height, color_system=None
        )
        self.now = 100.0
        self.board = Board(self.console, "val_loss", clock=lambda: self.now)

    def see(self, *jobs: JobState) -> list[str]:
        """The new lines."""
        before = len(self._file.getvalue())
        self.board.see(state(*jobs), Restarted())
        return self._file.getvalue()[before:].splitlines()

    def page(self, *jobs: JobState, devices: int = 1) -> list[str]:
        self.console.print(self.board.page(state(*jobs, devices=devices)))
        return [line.rstrip() for line in self._file.getvalue().splitlines()]


def test_the_table_says_what_every_job_does_and_why_and_how_long_it_takes() -> None:
    shown = Shown()
    shown.now += 55
    assert shown.page(AT_RUNG, RUNNING, NEW) == [
        "3 jobs on 1 device; 55 s",
        "job   state      step  val_loss  left  device  why",
        "lr=3  running  60/120    4.7081  12 s     75%",
        "lr=1  at rung  80/120      5.02   4 s     25%  waits for lr=3 at step 80",
        "lr=9  waiting       0                      0%",
    ]


def test_the_end_is_predicted_once_every_job_is_planned() -> None:
    assert seconds_left(state(RUNNING, AT_RUNG, NEW)) is None
    assert seconds_left(state(RUNNING, AT_RUNG, FAILED)) == 16.0
    assert seconds_left(state(RUNNING, AT_RUNG, devices=2)) == 12.0, "no job is on two devices"
    assert seconds_left(state(FAILED)) is None
    assert Shown().page(RUNNING, AT_RUNG)[0] == "2 jobs on 1 device; 0 s; about 16 s left"


def test_without_a_terminal_a_line_comes_when_a_state_changes_and_not_at_every_turn() -> None:
    shown = Shown()
    assert shown.see(NEW, replace(RUNNING, phase="starting", step=0, left=0, metric=None)) == [
        "0 s  lr=3  starting, step 0"
    ]
    shown.now += 7
    first = replace(RUNNING, step=10, left=110)
    assert shown.see(NEW, first) == ["7 s  lr=3  training, step 10/120, val_loss 4.7081"]
    for step in range(20, 60, 10):
        turned = replace(RUNNING, step=step, left=120 - step)
        assert shown.see(NEW, turned) == []
        assert shown.see(NEW, replace(turned, phase="ready", reason="waits for its turn")) == []
    assert shown.see(NEW, replace(RUNNING, phase="finished", step=120, left=0)) == [
        "7 s  lr=3  finished, step 120/120, val_loss 4.7081"
    ]


def test_a_line_comes_when_the_reason_for_waiting_changes() -> None:
    shown = Shown()
    lobby = replace(NEW, phase="lobby", reason="needs 3.0 GiB, and 2.0 GiB are left")
    assert shown.see(lobby) == ["0 s  lr=9  lobby, step 0: needs 3.0 GiB, and 2.0 GiB are left"]
    assert shown.see(lobby) == []
    assert len(shown.see(replace(lobby, reason="needs 3.0 GiB, and 2.5 GiB are left"))) == 1


def test_an_error_is_shown_as_it_is_written() -> None:
    assert Shown().see(FAILED) == ["0 s  lr=7  failed, step 3/12: ValueError: no [b]such[/b] key"]
    assert Shown().page(FAILED)[2].endswith("ValueError: no [b]such[/b] key")
