"""What is said in single cases: events in, commands and lines out."""

import math

import pytest
from support.fleet_simulator import PaperFleet, PaperJob
from support.fleet_told import ended, planned, told

from trainers.fleet.deciding.decide import decide
from trainers.fleet.deciding.events import (
    Added,
    Departed,
    DeviceEnded,
    Event,
    Failed,
    Finished,
    FleetError,
    InterruptAsked,
    JobMemory,
    Leave,
    Planned,
    Restarted,
    Start,
    StepTimes,
    StopAsked,
    TimeChecked,
    Turn,
    Yield,
)
from trainers.fleet.deciding.fleet_state import FleetSettings
from trainers.fleet.deciding.halving import Halving


def test_every_job_is_started_before_any_trains() -> None:
    state, said = told(FleetSettings(), Added("a"), Added("b"), planned("a"))
    assert said == [Start("b", 0)]
    assert state.jobs["a"].phase == "ready"


def unknown(job: str, device: int, left: int = 100) -> Planned:
    """A job of plain Lightning: nobody knows what a step takes."""
    return Planned(job, device, 0, left, StepTimes(), JobMemory(1), seconds=0.1)


def test_jobs_whose_steps_nobody_can_predict_make_one_each_and_are_shared_out_then() -> None:
    added = [Added(name) for name in "abcd"]
    events = [*added, unknown("a", 0), unknown("c", 0), unknown("d", 0)]
    state, said = told(FleetSettings(2), *events)
    assert said == [Turn("a", 0, 1, False)]
    state, said = decide(state, ended("a", 1, 99))
    assert said == (Turn("c", 0, 1, False),)
    state, said = decide(state, unknown("b", 1, left=1))
    state, said = decide(state, ended("c", 1, 99))
    assert said == (Turn("d", 0, 1, False),)
    state, said = decide(state, Finished("b", 1, 1, 1.0, None))
    assert not said  # device 1 asks for a job, and device 0 is busy
    state, [leave, *_] = decide(state, ended("d", 1, 99))
    assert isinstance(leave, Leave) and (leave.device, leave.why) == (0, "moved")


def test_a_device_asks_for_a_job_before_it_has_nothing_to_do() -> None:
    added = [Added(name) for name in "abc"]
    events = [*added, planned("a"), planned("b", 1, left=2), planned("c")]
    state, [turn] = told(FleetSettings(2), *events)
    assert isinstance(turn, Turn) and turn.device == 0
    assert state.busy[1] == Turn("b", 1, 1, False)
    state, said = decide(state, ended("b", 1, 1, device=1))
    assert said == (Turn("b", 1, 1, False),)
    assert [job.name for job in state.jobs.values() if job.exit.target == 1] == ["c"]


def test_a_failed_job_frees_its_device_and_the_others_go_on() -> None:
    failed = Failed("a", 0, "ValueError: no", "a traceback")
    state, said = told(FleetSettings(), Added("a"), Added("b"), failed)
    assert said == [Start("b", 0)]
    job = state.jobs["a"]
    assert (job.phase, job.why, job.exit.details) == ("failed", "ValueError: no", "a traceback")


def test_a_job_may_be_added_when_all_others_have_finished() -> None:
    finished = Finished("a", 0, 100, 1.0, 0.5)
    state, said = told(FleetSettings(), Added("a"), planned("a"), finished)
    assert state.is_done and not said
    state, said = decide(state, Added("b"))
    assert not state.is_done and said == (Start("b", 0),)


def test_a_stopped_job_leaves_when_its_turn_ends() -> None:
    events = Added("a"), planned("a"), StopAsked("a", "no hope")
    state, said = told(FleetSettings(), *events)
    assert not said
    state, said = told(FleetSettings(), *events, ended("a", 1, 99))
    assert said == [Leave("a", 0, "stopped")]
    state, said = told(FleetSettings(), *events, ended("a", 1, 99), Departed("a", 0, 1))
    assert (state.jobs["a"].phase, state.jobs["a"].why, state.is_done) == (
        "stopped",
        "no hope",
        True,
    )


@pytest.mark.parametrize(
    ("asked", "why"),
    [(InterruptAsked(), "interrupted"), (TimeChecked(7200.0), "the 2 h were over")],
)
def test_after_ctrl_c_or_its_time_every_job_leaves_and_may_come_back(
    asked: Event, why: str
) -> None:
    settings = FleetSettings(seconds=7200.0)
    both = Added("a"), Added("b"), planned("a"), planned("b"), TimeChecked(7199.0)
    _, said = told(settings, *both, ended("a", 1, 99))
    assert isinstance(said[0], Turn), "the time is not over yet"
    both = *both, asked
    _, said = told(settings, *both, ended("a", 1, 99))
    assert said == [Leave("a", 0, "interrupted")]
    _, said = told(settings, *both, ended("a", 1, 99), Departed("a", 0, 1))
    assert said == [Leave("b", 0, "interrupted")]
    gone = *both, ended("a", 1, 99), Departed("a", 0, 1), Departed("b", 0, 0)
    state, said = told(settings, *gone)
    assert state.is_done and state.jobs["a"].why == f"{why} at step 1"
    _, said = told(settings, *gone, Restarted())
    assert said == [Start("a", 0)]


def test_a_job_that_lives_nowhere_when_the_time_is_over_says_so() -> None:
    events = Added("a"), Added("b"), TimeChecked(3600.0)
    state, _ = told(FleetSettings(seconds=3600.0), *events)
    assert state.jobs["b"].why == "the 1 h were over at step 0"


def test_a_job_that_runs_while_two_devices_end_fails() -> None:
    fleet = PaperFleet(FleetSettings())
    fleet.add(PaperJob("bad", 10))
    fleet.add(PaperJob("good", 10))
    for _ in range(2):
        while fleet.doing[0] is None or fleet.doing[0].job != "bad":
            fleet.step()
        fleet.end_device(0)
    fleet.run()
    assert fleet.state.jobs["bad"].phase == "failed"
    assert fleet.state.jobs["bad"].reason == (
        "device 0 ended: killed; it ran this job, and so did a device that ended before"
    )
    assert fleet.state.jobs["good"].phase == "finished"


# ---- rungs --------------------------------------------------------------------------------------

RULE = FleetSettings(rule=Halving("val_loss", first=10))


def test_a_turn_ends_at_the_next_rung() -> None:
    settings = FleetSettings(quantum=8, rule=Halving("val_loss", first=10))
    _, said = told(settings, Added("a"), planned("a", step=5, left=95))
    assert said == [Turn("a", 0, 5, share=False)]


def test_a_metric_that_was_never_logged_fails_the_job_and_is_named() -> None:
    events = Added("a"), planned("a"), ended("a", 10, 90)
    _, said = told(RULE, *events)
    assert said == [Leave("a", 0, "stopped")]
    state, _ = told(RULE, *events, Departed("a", 0, 10))
    assert state.jobs["a"].phase == "failed"
    assert "val_loss was never logged by step 10" in state.jobs["a"].reason
    assert "self.log('val_loss', ...)" in state.jobs["a"].reason


@pytest.mark.parametrize("again, said", [(0.5, ""), (0.6, "and is 0.6"), (None, "was not logged")])
def test_a_rung_that_is_reported_again_is_compared(again: float | None, said: str) -> None:
    first = Added("a"), planned("a"), ended("a", 10, 90, 0.5), Restarted(), planned("a")
    state, _ = told(RULE, *first, ended("a", 10, 90, again))
    job = state.jobs["a"]
    assert job.phase == "running" and job.rungs.values == {10: 0.5}
    assert (said in job.why) if said else not job.why
    state, _ = decide(state, ended("a", 11, 89, 0.1))
    assert said in state.jobs["a"].why


@pytest.mark.parametrize(
    "why", [(Restarted(),), (InterruptAsked(), Departed("a", 0, 10), Restarted())]
)
def test_a_rung_whose_report_was_lost_is_reported_when_the_job_goes_on(
    why: tuple[Event, ...],
) -> None:
    """The checkpoint of step 10 was written, and nobody heard that the turn had ended."""
    fleet = FleetSettings(rule=Halving("val", eta=2, first=10), quantum=5)
    before = (Added("a"), planned("a"), ended("a", 5, 95), *why, Added("b"))
    state, said = told(fleet, *before, planned("a", step=10, left=90, metric=3.0))
    assert said == [Start("b", 0)]
    job = state.jobs["a"]
    assert (job.phase, job.rungs.rung, dict(job.rungs.values)) == ("at_rung", 10, {10: 3.0})
    rest = (planned("b"), ended("b", 5, 95), ended("b", 10, 90, 4.0))
    state, said = told(fleet, *before, planned("a", step=10, left=90, metric=3.0), *rest)
    assert said == [Leave("b", 0, "stopped")] and state.jobs["a"].phase == "ready"
    state, said = told(fleet, *before, planned("a", step=10, left=90))
    assert said == [Leave("a", 0, "stopped")] and "never logged" in state.jobs["a"].reason


def test_nan_equals_itself_when_it_is_reported_again() -> None:
    first = Added("a"), planned("a"), ended("a", 10, 90, math.nan), Restarted(), planned("a")
    state, _ = told(RULE, *first, ended("a", 10, 90, math.nan))
    assert not state.jobs["a"].rungs.remarks


def test_a_first_rung_that_nobody_reaches_is_refused_when_all_lengths_are_known() -> None:
    rule = FleetSettings(2, rule=Halving("val_loss", first=500))
    both = Added("a"), Added("b"), planned("a", left=100)
    told(rule, *both)  # b may be longer
    told(rule, *both, planned("b", 1, left=500))
    with pytest.raises(FleetError, match=r"looks first at step 500.* has 300 steps.*first="):
        told(rule, *both, planned("b", 1, left=300))


def test_a_run_that_ends_before_the_next_rung_simply_finishes() -> None:
    fleet = PaperFleet(FleetSettings(rule=Halving("loss", eta=2, first=4)))
    fleet.add(PaperJob("short", 3))
    fleet.add(PaperJob("long", 9, metric=lambda step: 1.0))
    fleet.run()
    assert {job.phase for job in fleet.state.jobs.values()} == {"finished"}


# ---- what nobody could mean ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "events, said",
    [
        ((Added("a"), Added("a")), "job 'a' was added twice"),
        ((Departed("b", 0, 1),), "job 'b', which was never added"),
        ((Added("a"), planned("a", device=3)), "device 3, and there are 1"),
    ],
    ids=["twice", "unknown", "device"],
)
def test_an_event_that_cannot_be_is_refused(events: tuple[Event, ...], said: str) -> None:
    with pytest.raises(FleetError, match=said):
        told(FleetSettings(), *events)


# ---- turns --------------------------------------------------------------------------------------


def test_jobs_with_host_tails_alternate_and_share() -> None:
    both = Added("a"), Added("b"), planned("a", tail=0.4), planned("b", tail=0.4)
    _, said = told(FleetSettings(), *both)
    assert said == [Turn("a", 0, 1, share=True)]
    _, said = told(FleetSettings(), *both, ended("a", 1, 99))
    assert said == [Turn("b", 0, 1, share=True)]


def test_shared_turns_hide_the_tails_that_they_should() -> None:
    fleet = PaperFleet(FleetSettings())
    for name in "ab":
        fleet.add(PaperJob(name, 50, 1.0, tail_seconds=0.4, swap_seconds=0.05))
    assert fleet.run() == pytest.approx(100 * 0.65, rel=0.05)


def test_swaps_take_at_most_two_percent() -> None:
    fleet = PaperFleet(FleetSettings())
    for name in "abc":
        fleet.add(PaperJob(name, 400, 1.0, swap_seconds=0.9))
    assert 1200 < fleet.run() <= 1200 * 1.02 + 3


def test_the_last_job_has_longer_turns() -> None:
    events = Added("a"), planned("a"), ended("a", 1, 99)
    _, said = told(FleetSettings(quantum_seconds=2.0), *events)
    assert said == [Turn("a", 0, 40, share=False)]


def test_of_jobs_that_could_train_only_those_of_the_highest_priority_do() -> None:
    events = [Added("low"), Added("high", 1), planned("low"), planned("high")]
    state, said = told(FleetSettings(), *events)
    assert said == [Turn("high", 0, 1, False)]
    state, said = decide(state, ended("high", 1, 99))
    assert isinstance(said[0], Turn) and said[0].job == "high"
    state, said = decide(state, Finished("high", 0, 100, 1.0, None))
    assert [command.job for command in said] == ["low"]


def test_a_turn_ends_early_for_a_job_of_higher_priority() -> None:
    events = [Added("low"), planned("low"), ended("low", 1, 99)]
    state, [turn] = told(FleetSettings(), *events)
    assert isinstance(turn, Turn)
    state, said = decide(state, Added("equal"))
    assert not said
    state, said = decide(state, Added("high", 1))
    assert said == (Yield("low", 0),)
    state, said = decide(state, ended("low", 2, 98))
    assert said == (Start("high", 0),)
    state, said = decide(state, planned("high"))
    assert said == (Turn("high", 0, 1, False),)


# ---- one input ----------------------------------------------------------------------------------


def three(*priorities: int) -> list[Event]:
    """Jobs a, b, c are planned; a is the longest, and has the first turn if all are alike."""
    names = "abc"[: len(priorities)]
    added = [Added(name, priority) for name, priority in zip(names, priorities, strict=True)]
    return [*added, *(planned(name, left=100 - 10 * n) for n, name in enumerate(names))]


def turn(said: list[object]) -> Turn:
    [found] = said
    assert isinstance(found, Turn)
    return found


def test_whoever_waits_for_input_lends_its_turn_to_those_who_have_to_read_first() -> None:
    events = [*three(0, 0, 0), ended("a", 5, 95, waits_for=("c", "b"))]
    state, said = told(FleetSettings(), *events)
    assert turn(said).job == "c" and state.jobs["a"].turns.waits_for == ("c", "b")
    state, said = told(FleetSettings(), *events, ended("c", 5, 75))
    assert turn(said).job == "b" and state.jobs["a"].turns.waits_for == ("b",)
    state, said = told(FleetSettings(), *events, ended("c", 5, 75), ended("b", 5, 85))
    assert turn(said).job == "a" and turn(said).without == ()
    assert state.jobs["a"].turns.waited == 0, "turns that it lent are its own"


def test_a_job_of_higher_priority_lends_its_turn_and_nobody_between_cuts_in() -> None:
    settings = FleetSettings()
    events: list[Event] = [Added("high", 2), planned("high"), Added("low", 0)]
    events += [ended("high", 5, 95), Added("middle", 1), ended("high", 6, 94)]
    _, said = told(settings, *events)
    assert turn(said).job == "high", "others are not started while it can train"
    added: list[Event] = [Added("low", 0), planned("low"), Added("high", 2), ended("low", 1, 99)]
    added += [planned("high")]
    _, said = told(settings, *added)
    assert turn(said).job == "high"
    waits = [*added, ended("high", 5, 95, waits_for=("low",))]
    _, said = told(settings, *waits)
    assert turn(said).job == "low", "and no Yield follows"
    _, said = told(settings, *waits, Added("middle", 1))
    assert said == [], "the turn is one of the highest priority now"
    _, said = told(settings, *waits, Added("middle", 1), ended("low", 2, 98))
    assert turn(said).job == "high"


@pytest.mark.parametrize("how", ["failed", "stopped", "at a rung", "moved"])
def test_nobody_waits_for_a_job_that_does_not_come(how: str) -> None:
    rule = Halving("loss", eta=2, first=5) if how == "at a rung" else None
    settings, b = FleetSettings(rule=rule), ("b",)
    events = three(0, 0)
    if how == "failed":
        events += [ended("a", 4, 96, waits_for=b), Failed("b", 0, "diverged")]
    elif how == "stopped":
        events += [ended("a", 4, 96, waits_for=b), StopAsked("b", "asked"), ended("b", 2, 88)]
        state, said = told(settings, *events)
        assert said == [Leave("b", 0, "stopped")]
        events += [Departed("b", 0, 2)]
    elif how == "moved":
        events += [ended("a", 4, 96, waits_for=b), DeviceEnded(0, "killed", "b")]
        events += [planned("a", step=4, left=96)]
        state, said = told(settings, *events)
        assert state.jobs["a"].turns.waits_for == (), (
            "it begins again, and says anew what it waits for"
        )
        return
    else:
        events += [ended("a", 3, 97, 1.0), ended("b", 5, 85, 1.0)]
        events += [ended("a", 4, 96, 1.0, waits_for=b)]
    state, said = told(settings, *events)
    assert turn(said).job == "a"
    assert turn(said).without == (() if how == "stopped" else b)
