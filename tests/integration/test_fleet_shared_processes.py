"""Jobs in the processes of several devices that read the same input: decoded once for all."""

import multiprocessing
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.fleet_loaders import COUNT, Counting, NotSent, reads
from support.fleet_outcomes import wrong

from benchmarks.jobs.fleet_jobs import BUDGET, QUIET, Outcome, alone
from trainers.fleet import Fleet
from trainers.fleet.deciding.events import Event, TurnEnded
from trainers.fleet.deciding.fleet_state import FleetState

pytestmark = [
    pytest.mark.usefixtures("nothing_left_at_once"),
    *(pytest.mark.filterwarnings(line) for line in QUIET),
]
EPOCHS = 2
AHEAD = COUNT
"""Workers may begin with a pass that nobody asks for."""
KINDS = {"adam": (1, "adam"), "sgd": (2, "sgd"), "third": (3, "adam"), "fourth": (4, "sgd")}


def kinds(file: Path, epochs: int = EPOCHS, **more: Any) -> dict[str, Counting]:
    return {name: Counting(*kind, epochs=epochs, file=file, **more) for name, kind in KINDS.items()}


@pytest.fixture(scope="module")
def lone(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Outcome]:
    file = tmp_path_factory.mktemp("lone") / "reads"
    return {name: alone(kind, BUDGET) for name, kind in kinds(file).items()}


def made(folder: Path, jobs: Mapping[str, Counting], **more: Any) -> Fleet:
    fleet = Fleet(BUDGET, ["cpu", "cpu"], folder=folder, metric="val_loss", quantum=2, **more)
    for name, job in jobs.items():
        fleet.add(name, job.module, train=job.train, val=job.val, trainer=job.trainer,
                  offload=job.options, seed=job.seed)  # fmt: skip
    return fleet


NONE: Mapping[str, list[str]] = {name: [] for name in KINDS}


def reader() -> multiprocessing.process.BaseProcess | None:
    """The process that reads for all devices."""
    children = multiprocessing.active_children()
    return next((child for child in children if child.name == "perfect-inputs"), None)


def test_jobs_on_two_devices_read_one_input_with_one_decode_a_sample_and_pass(
    lone: Mapping[str, Outcome], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "reads"
    fleet = made(tmp_path / "fleet", kinds(file))
    said = fleet.explain()
    result = fleet.fit()
    assert {job.state for job in result.jobs.values()} == {"finished"}, result.table()
    assert wrong(lone, tmp_path / "fleet") == NONE
    assert "input shared by adam, sgd, third, fourth: one decode a sample" in said
    assert EPOCHS * COUNT <= reads(file) <= EPOCHS * COUNT + AHEAD
    assert "reads pass" not in capfd.readouterr().err


def test_if_the_process_that_reads_is_killed_the_devices_read_on_by_themselves(
    lone: Mapping[str, Outcome], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    killed: list[int] = []

    def kill(state: FleetState, event: Event) -> None:
        process = reader()
        steps = [job.step for job in state.jobs.values()]
        if process is not None and process.pid and not killed and max(steps) >= 4:
            killed.append(process.pid)
            os.kill(process.pid, signal.SIGKILL)

    result = made(tmp_path, kinds(tmp_path / "reads"), watch=kill).fit()
    assert killed
    assert {job.state for job in result.jobs.values()} == {"finished"}, result.table()
    assert wrong(lone, tmp_path) == NONE
    said = capfd.readouterr().err
    assert "is read in this process from batch" in said, "nobody falls back in silence"


def test_a_device_that_dies_leaves_the_input_to_the_others_and_comes_back_to_it(
    lone: Mapping[str, Outcome], tmp_path: Path
) -> None:
    killed: list[int] = []

    def kill(state: FleetState, event: Event) -> None:
        if isinstance(event, TurnEnded) and not killed and event.step >= 4:
            [process] = [
                child
                for child in multiprocessing.active_children()
                if child.name == f"perfect-device-{event.device}"
            ]
            assert process.pid
            killed.append(process.pid)
            os.kill(process.pid, signal.SIGKILL)

    fleet = made(tmp_path, kinds(tmp_path / "reads"), watch=kill, checkpoint_minutes=1e-9)
    result = fleet.fit()
    assert killed
    assert {job.state for job in result.jobs.values()} == {"finished"}, result.table()
    assert wrong(lone, tmp_path) == NONE


def test_a_loader_that_cannot_be_sent_on_is_read_by_each_device(
    lone: Mapping[str, Outcome], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    jobs = kinds(tmp_path / "reads", kind=NotSent)
    fleet = Fleet(BUDGET, ["cpu", "cpu"], folder=tmp_path, metric="val_loss", quantum=2)
    for name, job in jobs.items():
        fleet.add(name, job.module, train=job.train(), val=job.val, trainer=job.trainer,
                  offload=job.options, seed=job.seed)  # fmt: skip
    result = fleet.fit()
    assert {job.state for job in result.jobs.values()} == {"finished"}, result.table()
    assert wrong(lone, tmp_path) == NONE
    said = capfd.readouterr().err
    assert "an input is read for one device only, as it cannot be sent: this stays" in said
