"""Jobs that have several devices: who gets them, who leaves for whom, and when one gets more."""

from support.fleet_simulator import PaperFleet
from support.paper_job import PaperJob

from trainers.fleet.deciding.decide import decide
from trainers.fleet.deciding.events import (
    Added,
    JobMemory,
    Planned,
    Start,
    StepTimes,
    Turn,
    TurnEnded,
)
from trainers.fleet.deciding.fleet_state import FleetSettings, FleetState


def run(fleet: PaperFleet, *jobs: PaperJob) -> list[Start]:
    """Run these jobs to their end, and return the starts."""
    for job in jobs:
        fleet.add(job)
    fleet.run()
    fleet.replay()
    assert {job.phase for job in fleet.state.jobs.values()} == {"finished"}
    return [each for commands in fleet.said for each in commands if isinstance(each, Start)]


def on(devices: int, *, migrate: bool = True) -> PaperFleet:
    return PaperFleet(FleetSettings(devices, move_seconds=0.5, migrate=migrate))


def test_fewer_jobs_than_devices_share_them_out_by_the_prediction() -> None:
    jobs = [PaperJob(name, 1000, start_seconds=0.5, most=4) for name in "ab"]
    starts = run(fleet := on(4), *jobs)
    assert [(start.job, start.width) for start in starts] == [
        ("a", 1), ("b", 1), ("a", 2), ("b", 2),
    ]  # fmt: skip
    assert fleet.clock < 1000 / 1.8 + 10


def test_what_a_step_took_on_one_device_says_nothing_about_two() -> None:
    fleet, job = on(2), PaperJob("a", 1000, most=2)
    fleet.add(job)
    fleet.add(PaperJob("short", 20))
    while job.starts < 2 or fleet.state.jobs["a"].phase == "starting":
        fleet.step()
    assert fleet.state.jobs["a"].width == 2
    assert fleet.state.jobs["a"].step_seconds == job.seconds_on(2)


def test_the_last_job_gets_what_falls_free() -> None:
    short, long = PaperJob("short", 200, most=2), PaperJob("long", 1000, most=4)
    starts = run(fleet := on(4), short, long)
    assert [start.width for start in starts if start.job == "long"][-1] == 4
    assert fleet.clock < 0.6 * 1000


def test_jobs_that_share_a_device_get_empty_ones_before_another_gets_three() -> None:
    fleet = on(4)
    fleet.add(PaperJob("first", 30, least=3, most=3))
    for name, most in (("a", 4), ("b", 1), ("c", 1)):
        fleet.add(PaperJob(name, 400, most=most, start_seconds=1.0))
    starts = run(fleet)
    assert [start.width for start in starts if start.job == "a"][:2] == [1, 2]
    assert fleet.clock < 30 / 2.6 + 400 + 20


def test_a_job_that_gains_nothing_by_more_devices_keeps_its_one() -> None:
    assert len(run(on(4), PaperJob("a", 1000, most=4, gain=0.02))) == 1


def test_nothing_moves_onto_more_devices_where_that_is_not_wanted() -> None:
    assert len(run(on(4, migrate=False), PaperJob("a", 1000, most=4))) == 1


def test_a_move_that_would_cost_more_than_it_saves_is_not_made() -> None:
    assert len(run(on(4), PaperJob("a", 20, start_seconds=30.0, most=4))) == 1


def test_a_job_that_needs_two_devices_gets_those_with_the_least_to_do() -> None:
    jobs = [PaperJob("long", 900), PaperJob("short", 100), PaperJob("shorter", 50)]
    wide = PaperJob("wide", 300, least=2, most=2)
    fleet = on(3)
    for job in jobs:
        fleet.add(job)
    while fleet.clock < 5:
        fleet.step()
    starts = run(fleet, wide)
    assert [start for start in starts if start.job == "wide"] == [Start("wide", 1, 2)]
    # The two others go on beside the long one, and move when it is done.
    assert fleet.clock < 900 + 100 + 50 + 10


def test_jobs_that_need_all_devices_come_one_after_the_other() -> None:
    jobs = [PaperJob(name, 50, least=3, most=3) for name in "abc"]
    assert [start.job for start in run(on(3), *jobs)] == ["a", "b", "c"]


def test_a_wide_job_gives_back_what_it_does_not_need_when_another_one_comes() -> None:
    fleet = on(2)
    fleet.add(PaperJob("wide", 1000, most=2))
    while fleet.jobs["wide"].width == 1:
        fleet.step()
    starts = run(fleet, PaperJob("new", 100))
    assert [(start.job, start.width) for start in starts] == [
        ("wide", 1), ("wide", 2), ("wide", 1), ("new", 1), ("wide", 2),
    ]  # fmt: skip


def test_a_job_of_higher_priority_gets_the_devices_of_a_wide_one() -> None:
    fleet = on(2)
    fleet.add(PaperJob("wide", 100, least=2, most=2))
    while fleet.clock < 5:
        fleet.step()
    run(fleet, PaperJob("urgent", 10, priority=1))
    done = [command.job for _, command in fleet.turns]
    first = done.index("urgent")
    assert set(done[first : done.index("wide", first)]) == {"urgent"}
    assert done[-1] == "wide"


def test_two_wide_jobs_make_room_for_an_urgent_one_that_needs_what_both_have() -> None:
    fleet = on(4)
    for name in "ab":
        fleet.add(PaperJob(name, 100, least=2, most=2))
    while fleet.clock < 5:
        fleet.step()
    starts = run(fleet, PaperJob("big", 20, priority=1, least=4, most=4))
    assert [start.job for start in starts] == ["a", "b", "big", "a", "b"]


def test_a_job_that_says_too_early_that_it_is_done_is_not_asked_to_spread() -> None:
    state = FleetState.without_jobs(FleetSettings(2))
    planned = Planned("a", 0, 0, 10, StepTimes(1.0), JobMemory(0), seconds_by_devices=(1.0, 0.5))
    for event in (Added("a", most=2), planned, TurnEnded("a", 0, 10, 10, 0, 10.0, 0.0, None)):
        state, commands = decide(state, event)
    assert [type(command) for command in commands] == [Turn]


def test_nobody_leaves_for_a_wide_job_that_has_no_memory_then_either() -> None:
    fleet = PaperFleet(FleetSettings(3, host_bytes=64, move_seconds=0.5))
    fleet.add(PaperJob("c", 100, memory=JobMemory(40), priority=1))
    for name in "ab":
        fleet.add(PaperJob(name, 100, memory=JobMemory(5)))
    while fleet.clock < 5:
        fleet.step()
    fleet.add(PaperJob("wide", 20, least=2, most=2, memory=JobMemory(30)))
    while fleet.jobs["c"].done < 95:
        fleet.step()
        assert not [job for job in fleet.state.jobs.values() if "leaves room" in job.reason]
    run(fleet)


def test_a_job_that_has_no_memory_on_more_devices_goes_back() -> None:
    fleet = PaperFleet(FleetSettings(2, host_bytes=10, move_seconds=0.5))
    job = PaperJob("a", 200, most=2, memory=JobMemory(8), memory_of_wide=JobMemory(20))
    assert [start.width for start in run(fleet, job)] == [1, 2, 1]
