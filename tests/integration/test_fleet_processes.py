"""Devices in processes of their own: the same bits, and a process that dies harms no other job."""

import logging
import multiprocessing
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import fleet_deaths
from support.fleet_outcomes import states, wrong

from benchmarks.jobs.fleet_jobs import BUDGET, KINDS, QUIET, Outcome, add, alone
from trainers.fleet import Fleet
from trainers.fleet.deciding.events import DeviceEnded, Event, TurnEnded
from trainers.fleet.deciding.fleet_state import FleetState
from trainers.fleet.hosting.device_process import PROGRAM, HostedJob, PickledProgram, pickle_program
from trainers.fleet.jobs.job_turns import LAST
from trainers.random_state import RandomState

pytestmark = [
    pytest.mark.usefixtures("nothing_left_at_once"),
    *(pytest.mark.filterwarnings(line) for line in QUIET),
]
JOBS = {name: replace(KINDS[name], epochs=3) for name in ("adam", "sgd", "plain")}


@pytest.fixture(scope="module")
def lone() -> Mapping[str, Outcome]:
    return {name: alone(kind, BUDGET) for name, kind in JOBS.items()}


def made(folder: Path, devices: Any = "cpu", **more: Any) -> Fleet:
    usual = {"metric": "val_loss", "quantum": 2, "isolation": "process"}
    return Fleet(BUDGET, devices, folder=folder, **{**usual, **more})


def test_a_program_is_not_written_through_a_link_that_was_put_there(tmp_path: Path) -> None:
    (tmp_path / "others.txt").write_text("another's")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / PROGRAM).symlink_to(tmp_path / "others.txt")
    program = fleet_deaths.write_levels
    job = HostedJob(program, tmp_path / "a", RandomState.capture(torch.device("cpu")))
    there = pickle_program("a", job).program
    assert isinstance(there, PickledProgram) and there.path == tmp_path / "a" / PROGRAM
    assert (tmp_path / "others.txt").read_text() == "another's"
    assert not there.path.is_symlink() and there.path.stat().st_size


def test_jobs_on_two_devices_have_their_own_bits_and_come_back_to_the_callers_modules(
    lone: Mapping[str, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: set[int] = set()

    def see(state: FleetState, event: Event) -> None:
        if isinstance(event, TurnEnded):
            devices.add(event.device)

    fleet = made(tmp_path, ["cpu", "cpu"], isolation=None, watch=see)
    module = add(fleet, "adam", JOBS["adam"])
    for name in ("sgd", "plain"):
        kind = JOBS[name]
        add(fleet, name, kind, kind.module, train=kind.train, val=kind.val)
    fleet.add_program("levels", fleet_deaths.write_levels)
    monkeypatch.setattr(logging.getLogger("perfect"), "level", logging.DEBUG)  # as -v, and as -q
    monkeypatch.setattr(logging.getLogger(), "level", logging.ERROR)
    logging.captureWarnings(True)
    try:
        assert states(fleet.fit()) == dict.fromkeys([*JOBS, "levels"], "finished")
    finally:
        logging.captureWarnings(False)
    assert (tmp_path / "jobs" / "levels" / "levels.txt").read_text() == "[10, 40] True"
    assert devices == {0, 1}
    assert wrong(lone, tmp_path) == {name: [] for name in JOBS}
    assert lone["adam"].differences(replace(Outcome.of(module), draws=(), logs=())) == []


def test_a_job_that_ends_its_process_twice_fails_and_the_others_go_on_in_another(
    lone: Mapping[str, Outcome], tmp_path: Path
) -> None:
    ended: list[str] = []

    def see(state: FleetState, event: Event) -> None:
        if isinstance(event, DeviceEnded):
            ended.append(event.why)

    fleet = made(tmp_path, watch=see, checkpoint_minutes=1e-9)
    for name, kind in JOBS.items():
        add(fleet, name, kind)
    add(fleet, "deadly", KINDS["plain"], fleet_deaths.deadly)
    result = fleet.fit()
    assert states(result) == {**dict.fromkeys(JOBS, "finished"), "deadly": "failed"}
    assert ended == ["its process was ended by SIGSEGV"] * 2
    why = result.jobs["deadly"].why
    assert "device 0 ended: its process was ended by SIGSEGV" in why
    assert "it ran this job, and so did a device that ended before" in why
    assert wrong(lone, tmp_path) == {name: [] for name in JOBS}


def test_ctrl_c_lets_the_jobs_of_all_processes_leave_and_they_go_on_later(
    tmp_path: Path,
) -> None:
    # So long that two of them train at once, however late the second process is.
    jobs = {name: replace(kind, epochs=40) for name, kind in JOBS.items()}
    lone = {name: alone(kind, BUDGET) for name, kind in jobs.items()}

    hits: list[int] = []

    def interrupt(state: FleetState, event: Event) -> None:
        begun = [job for job in state.jobs.values() if job.step >= 2 and not job.ended]
        if len(begun) >= 2 and not hits:  # a second one would end all at once
            hits.append(len(begun))
            signal.raise_signal(signal.SIGINT)

    fleet = made(tmp_path, ["cpu", "cpu"], watch=interrupt)
    for name, kind in jobs.items():
        add(fleet, name, kind)
    with pytest.raises(KeyboardInterrupt, match=r"jobs are checkpointed.*the same program"):
        fleet.fit()
    assert multiprocessing.active_children() == []
    kept = [name for name in jobs if (tmp_path / "jobs" / name / LAST).exists()]
    assert len(kept) >= 2
    again = made(tmp_path, ["cpu", "cpu"])
    for name, kind in jobs.items():
        add(again, name, kind)
    assert states(again.fit()) == dict.fromkeys(jobs, "finished")
    assert wrong(lone, tmp_path) == {name: [] for name in jobs}
