"""Who has room, and what a fleet is said to take, beside numbers worked out by hand."""

import pytest
from support.fleet_simulator import PaperFleet, PaperJob

from trainers.fleet.deciding.admission import (
    HeldMemory,
    missing_memory,
    why_it_never_fits,
)
from trainers.fleet.deciding.events import JobMemory, Planned, StepTimes
from trainers.fleet.deciding.fleet_state import FleetSettings
from trainers.fleet.deciding.prediction import predict

GIB = 2**30


def fleet(devices: int = 1, host: int = 0, device: int = 0, arena: int = 0) -> PaperFleet:
    return PaperFleet(FleetSettings(devices, host, device, arena, move_seconds=0.0))


def job(name: str, host: float, passing: float = 0.0, device: float = 0.0) -> PaperJob:
    memory = JobMemory(int(host * GIB), int(passing * GIB), int(device * GIB))
    return PaperJob(name, 8, 1.0, memory=memory)


def run_until(told: PaperFleet, name: str, phase: str) -> str:
    """Why the job is in this phase, when it first is."""
    while told.state.jobs[name].phase != phase:
        assert told.step()
    return told.state.jobs[name].why


def test_what_is_missing_is_said_with_the_numbers() -> None:
    limits = FleetSettings(host_bytes=8 * GIB)
    held = [HeldMemory("a", 0, JobMemory(4 * GIB)), HeldMemory("b", 0, JobMemory(2 * GIB))]
    assert missing_memory(HeldMemory("c", 0, JobMemory(2 * GIB)), held, limits) == ""
    assert missing_memory(HeldMemory("c", 0, JobMemory(3 * GIB)), held, limits) == (
        "memory: 3.0 GiB needed, 2.0 GiB of 8.0 GiB left, a and b hold 6.0 GiB"
    )


def test_a_plain_job_needs_its_device_beside_the_arena() -> None:
    limits = FleetSettings(2, device_bytes=10 * GIB, arena_bytes=6 * GIB)
    held = [HeldMemory("a", 0, JobMemory(0, 0, 3 * GIB))]
    assert missing_memory(HeldMemory("b", 1, JobMemory(0, 0, 3 * GIB)), held, limits) == ""
    assert missing_memory(HeldMemory("b", 0, JobMemory(0, 0, 3 * GIB)), held, limits) == (
        "memory of device 0: 3.0 GiB needed, 1.0 GiB of 10.0 GiB left, the arena and a hold 9.0 GiB"
    )
    assert "lower budget" in why_it_never_fits(JobMemory(0, 0, 5 * GIB), limits)


def test_a_job_that_fits_nowhere_fails_alone_and_says_what_to_do() -> None:
    told = fleet(host=8 * GIB)
    told.add(job("large", 7, passing=2))
    told.add(job("small", 1))
    told.run()
    assert told.state.jobs["small"].phase == "finished"
    assert told.state.jobs["large"].phase == "failed"
    assert told.state.jobs["large"].reason == (
        "it needs 9.0 GiB of the host's memory, and all jobs together may take 8.0 GiB: raise"
        " host_budget, or make the job smaller"
    )


def test_a_job_waits_for_memory_and_trains_when_others_have_ended() -> None:
    told = fleet(host=8 * GIB)
    for name, size in (("a", 3), ("b", 3), ("c", 3)):
        told.add(job(name, size))
    assert run_until(told, "b", "ready") == ""
    assert told.state.jobs["c"].why == (
        "waits for memory: 3.0 GiB needed, 2.0 GiB of 8.0 GiB left, a and b hold 6.0 GiB (if it"
        " takes as much as the largest job so far)"
    )
    told.run()
    assert told.state.jobs["c"].phase == "finished"


def test_a_small_job_passes_a_large_one_only_if_both_would_fit_together() -> None:
    told = fleet(devices=4, host=10 * GIB)
    for name, size in (("a", 5), ("large", 7), ("small", 2), ("middle", 3)):
        told.add(job(name, size))
    while any(j.phase == "starting" for j in told.state.jobs.values()):
        told.step()
    assert told.state.jobs["large"].why.startswith("waits for memory: 7.0 GiB needed")
    assert told.state.jobs["small"].phase == "running"
    assert told.state.jobs["middle"].why == (
        "waits for large, which came before it and needs memory, too"
    )
    told.run()
    assert {j.phase for j in told.state.jobs.values()} == {"finished"}


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
