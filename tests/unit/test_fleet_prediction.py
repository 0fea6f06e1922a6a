"""What a fleet is said to take, beside figures worked out by hand and a run on paper."""

import pytest
from support.fleet_simulator import PaperFleet, PaperJob

from trainers.fleet.deciding.events import JobMemory, Planned, StepTimes
from trainers.fleet.deciding.fleet_state import FleetSettings
from trainers.fleet.deciding.prediction import predict


def plan(job: str, left: int, tail: float = 0.0, swap: float = 0.0, host: int = 0) -> Planned:
    return Planned(job, 0, 0, left, StepTimes(1.0, tail, swap), JobMemory(host))


def test_twelve_equal_jobs_on_eight_devices() -> None:
    told = predict([plan(f"job{n}", 400) for n in range(12)], FleetSettings(8, move_seconds=1.0))
    assert (told.ends.serial, told.ends.fifo, told.ends.pinned, told.ends.bound) == (
        4800,
        800,
        800,
        600,
    )
    assert 600 <= told.ends.fleet <= 1.03 * 600
    assert 1 <= told.moves <= 8
    assert "all jobs together, on 8 devices" in told.describe()
    assert f"{told.gain:.2f} times shorter than one job a device" in told.describe()


def test_the_longest_job_binds_and_is_named() -> None:
    told = predict([plan("short", 50), plan("long", 300)], FleetSettings(2))
    assert told.ends.fleet == told.ends.bound == 300
    assert "job long: its steps follow each other" in told.describe()
    assert "Sharing brings nothing here" in told.describe()


def test_one_device_without_host_tails_gains_nothing_and_it_is_said() -> None:
    told = predict([plan("a", 300, swap=0.01), plan("b", 100, swap=0.01)], FleetSettings())
    assert 400 <= told.ends.fleet <= 408
    assert told.swaps > 0
    assert "Sharing brings nothing on one device" in told.describe()


def test_host_tails_are_hidden_as_they_are_on_paper() -> None:
    jobs = [PaperJob(name, 60, 1.0, tail_seconds=0.4, swap_seconds=0.05) for name in "ab"]
    fleet = PaperFleet(FleetSettings())
    for job in jobs:
        fleet.add(job)
    told = predict([plan(job.name, 60, 0.4, 0.05) for job in jobs], FleetSettings())
    assert told.ends.fleet == pytest.approx(fleet.run(), rel=0.03)
    assert "of host tails hidden" in told.describe()


def test_memory_that_makes_jobs_wait_is_named() -> None:
    settings = FleetSettings(4, host_bytes=130)
    told = predict(
        [*(plan(f"j{n}", 100, host=60) for n in range(4)), plan("big", 9, host=200)], settings
    )
    assert told.ends.fleet >= 200
    assert "memory: j2, j3 would wait" in told.describe()
    assert "do not fit even alone: big" in told.describe()
    assert "host memory, all jobs at once" in told.describe()
    assert "240 B  of 130 B" in told.describe(), "four jobs of 60; the one that never fits is none"


def test_what_nobody_knows_is_said() -> None:
    unknown = Planned("x", 0, 0, 10, StepTimes(), JobMemory(0))
    assert (
        "Nobody knows yet what a step takes of: x" in predict([unknown], FleetSettings()).describe()
    )


def test_a_job_that_has_trained_already_counts_with_what_is_left() -> None:
    resumed = Planned("a", 0, 900, 100, StepTimes(1.0), JobMemory(0))
    assert predict([resumed], FleetSettings()).ends.fleet == 100
