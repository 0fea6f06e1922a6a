"""A job of a fleet stands aside in the middle of a step, for jobs of higher priority."""

import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.jobs.fleet_jobs import KINDS, QUIET, JobKind, Outcome, add, alone, make
from trainers.fleet import Fleet
from trainers.fleet.deciding.events import Event, Planned, TurnEnded
from trainers.fleet.deciding.fleet_state import FleetState
from trainers.fleet.jobs.job_turns import FINAL

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]

LOW = replace(KINDS["adam"], epochs=6, width=100_000)
"""Most of the time of its steps is kernels."""


@pytest.fixture(autouse=True)
def every_step_is_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "trainers.fleet.deciding.decide.worth_standing_aside"
    monkeypatch.setattr(name, lambda seconds, nbytes: True)


@pytest.fixture(scope="module")
def lone() -> Outcome:
    return alone(LOW)


def add_high(fleet: Fleet, name: str, kind: JobKind, priority: int) -> None:
    """Add a job while the fleet runs: it makes its module in its own turn."""
    fleet.add(
        name, kind.module, train=kind.train, val=kind.val, trainer=kind.trainer,
        offload=kind.options, priority=priority,
    )  # fmt: skip


def check_weights(folder: Path, name: str, kind: JobKind) -> None:
    weights = torch.load(folder / "jobs" / name / FINAL)["state_dict"]
    assert all(torch.equal(value, weights[key]) for key, value in alone(kind).weights.items())


def test_jobs_that_come_in_the_middle_of_a_step_change_no_bit(
    lone: Outcome, tmp_path: Path
) -> None:
    highs = {
        "first": KINDS["sgd"], "plain": KINDS["plain"], "failing": JobKind(9, fails_at=4),
        "last": replace(KINDS["adam"], seed=77),
    }  # fmt: skip
    waiting, asides, beside, stood = dict(highs), [0], set(), [False]

    def see(state: FleetState, event: Event) -> None:
        low = state.jobs["low"]
        if isinstance(event, TurnEnded) and event.aside:
            assert event.job == "low" and low.turns.is_aside
            asides[0] += 1
        elif stood[0]:
            beside.add((type(event).__name__, getattr(event, "job", "")))
        stood[0] = low.turns.is_aside
        comes = (
            isinstance(event, Planned | TurnEnded) and event.job == "low" and not low.turns.is_aside
        )
        if waiting and comes:
            name = next(iter(waiting))
            add_high(fleet, name, waiting.pop(name), priority=len(waiting) + 1)

    fleet = make(tmp_path, quantum=5, watch=see)
    low = add(fleet, "low", LOW)
    result = fleet.fit()
    assert asides[0] >= 2 and {kind for kind, _ in beside} & {"Finished", "Failed"}
    ends = {name: job.state for name, job in result.jobs.items()}
    assert ends.pop("failing") == "failed" and set(ends.values()) == {"finished"}
    assert not lone.differences(Outcome.of(low))
    for name in ("first", "plain", "last"):
        check_weights(tmp_path, name, highs[name])


def test_ctrl_c_while_a_step_stands_aside_keeps_both_jobs(lone: Outcome, tmp_path: Path) -> None:
    asides = [0]

    def see(state: FleetState, event: Event) -> None:
        if isinstance(event, Planned) and event.job == "low" and "high" not in state.jobs:
            add_high(fleet, "high", KINDS["sgd"], 1)
        if isinstance(event, TurnEnded) and event.aside:
            asides[0] += 1
        if isinstance(event, TurnEnded) and event.job == "high" and not state.interrupted:
            signal.raise_signal(signal.SIGINT)

    fleet = make(tmp_path, quantum=3, watch=see)
    add(fleet, "low", LOW)
    with pytest.raises(KeyboardInterrupt, match="2 jobs are checkpointed"):
        fleet.fit()
    assert asides[0] == 1
    fleet = make(tmp_path, quantum=3)
    low = add(fleet, "low", LOW)
    add_high(fleet, "high", KINDS["sgd"], 1)
    assert {job.state for job in fleet.fit().jobs.values()} == {"finished"}
    assert not lone.differences(Outcome.of(low))
    check_weights(tmp_path, "high", KINDS["sgd"])


def test_a_fleet_that_ends_by_an_error_while_a_step_stands_aside_leaves_no_thread(
    tmp_path: Path,
) -> None:
    def see(state: FleetState, event: Event) -> None:
        if isinstance(event, Planned) and event.job == "low" and "high" not in state.jobs:
            add_high(fleet, "high", KINDS["sgd"], 1)
        if isinstance(event, TurnEnded) and event.job == "high":
            assert state.jobs["low"].turns.is_aside
            raise ValueError("the watcher fails")

    fleet = make(tmp_path, quantum=3, watch=see)
    add(fleet, "low", LOW)
    with pytest.raises(ValueError, match="the watcher fails"):
        fleet.fit()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("perfect-job")]
