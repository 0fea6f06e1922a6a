"""Who has room, with the numbers written down by hand."""

from support.fleet_simulator import PaperFleet, PaperJob

from trainers.fleet.deciding.admission import (
    HeldMemory,
    host_bytes,
    missing_memory,
    why_it_never_fits,
)
from trainers.fleet.deciding.events import JobMemory
from trainers.fleet.deciding.fleet_state import FleetSettings
from trainers.fleet.deciding.halving import Halving

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


def test_each_device_copies_for_one_job_at_a_time() -> None:
    held = [
        HeldMemory(n, 0, JobMemory(10, passing)) for n, passing in (("a", 3), ("b", 5), ("c", 4))
    ]
    assert host_bytes(held, 1) == 35
    assert host_bytes(held, 2) == 39


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


def test_jobs_at_a_rung_leave_so_that_those_they_wait_for_have_their_memory() -> None:
    told = PaperFleet(FleetSettings(1, host_bytes=4 * GIB, rule=Halving("loss", 2, first=2)))
    for number, name in enumerate("abcd"):
        told.add(PaperJob(name, 6, memory=JobMemory(2 * GIB), metric=lambda s, n=number: float(n)))
    told.run()
    phases = {name: j.phase for name, j in told.state.jobs.items()}
    assert phases == {"a": "finished", "b": "stopped", "c": "stopped", "d": "stopped"}
    assert told.state.jobs["b"].step == 4 and told.state.jobs["d"].step == 2
