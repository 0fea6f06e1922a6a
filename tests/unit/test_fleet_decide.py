"""What is said in single cases: events in, commands and lines out; who goes on at a rung."""

import pytest
from support.fleet_simulator import PaperFleet, PaperJob
from support.fleet_told import ended, planned, told

from trainers.fleet.deciding.decide import decide
from trainers.fleet.deciding.events import (
    Added,
    Departed,
    Event,
    Finished,
    FleetError,
    InterruptAsked,
    JobMemory,
    Leave,
    Planned,
    Restarted,
    Start,
    StepTimes,
    TimeChecked,
    Turn,
    TurnEnded,
    Yield,
)
from trainers.fleet.deciding.fleet_state import FleetSettings
from trainers.fleet.deciding.halving import Halving


def unknown(job: str, device: int, left: int = 100) -> Planned:
    """A job of plain Lightning: nobody knows what a step takes."""
    return Planned(job, device, 0, left, StepTimes(), JobMemory(1), seconds=0.1)


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


def test_a_first_rung_that_nobody_reaches_is_refused_when_all_lengths_are_known() -> None:
    rule = FleetSettings(2, rule=Halving("val_loss", first=500))
    both = Added("a"), Added("b"), planned("a", left=100)
    told(rule, *both)  # b may be longer
    told(rule, *both, planned("b", 1, left=500))
    with pytest.raises(FleetError, match=r"looks first at step 500.* has 300 steps.*first="):
        told(rule, *both, planned("b", 1, left=300))


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


def big(job: str, step_seconds: float = 1.0, turn_bytes: int = 10) -> Planned:
    memory = JobMemory(1, turn_bytes=turn_bytes)
    return Planned(job, 0, 0, 100, StepTimes(step_seconds, 0.0, 0.01), memory)


def aside(job: str, steps: int = 0) -> TurnEnded:
    return TurnEnded(job, 0, 1 + steps, steps, 99, 1.0 * steps, 0.0, None, aside=True)


def test_a_long_step_stands_aside_for_a_job_of_higher_priority_and_ends_after_it() -> None:
    fleet = FleetSettings(quantum=1)
    state, said = told(fleet, Added("low"), big("low"), ended("low", 1, 99), Added("high", 1))
    assert said == [Yield("low", 0, at_once=True)]
    state, said = decide(state, aside("low"))
    assert said == (Start("high", 0),) and state.jobs["low"].step == 1
    state, said = decide(state, big("high"))
    assert said == (Turn("high", 0, 1, share=False),)
    state, said = decide(state, Added("other"))
    assert not said  # it waits until the step is over
    state, said = decide(state, ended("high", 1, 99))
    assert said == (Turn("high", 0, 1, share=False),)
    state, said = decide(state, Finished("high", 0, 100, 1.0, None))
    assert said == (Turn("low", 0, 0, share=False),)
    state, said = decide(state, ended("low", 2, 98))
    assert said == (Start("other", 0),) and not state.jobs["low"].turns.is_aside


@pytest.mark.parametrize(
    ("fleet", "low"),
    [
        (FleetSettings(quantum=1), big("low", step_seconds=0.01)),
        (FleetSettings(quantum=1), big("low", turn_bytes=0)),
        (FleetSettings(quantum=1, host_bytes=10), big("low")),
    ],
    ids=["a short step", "plain Lightning", "no room on the host for the copy"],
)
def test_a_step_that_cannot_or_need_not_stand_aside_ends_first(
    fleet: FleetSettings, low: Planned
) -> None:
    seconds = low.times.step_seconds
    turn = TurnEnded("low", 0, 1, 1, 99, seconds, 0.0, None)
    _, said = told(fleet, Added("low"), low, turn, Added("high", 1))
    assert said == [Yield("low", 0)]


def at(rung: int, **values: float) -> dict[str, dict[int, float]]:
    return {job: {rung: value} for job, value in values.items()}


def test_rungs_grow_by_eta() -> None:
    rule = Halving("loss", eta=3, first=500)
    assert [rule.next_look(s) for s in (0, 499, 500, 1499, 1500)] == [500, 500, 1500, 1500, 4500]


def test_the_best_third_goes_on_and_a_part_of_a_job_counts_as_one() -> None:
    rule = Halving("loss", eta=3, first=10)
    stopped = rule.judge(at(10, a=4.0, b=1.0, c=3.0, d=2.0), gone=())
    assert {*stopped} == {"a", "c"}
    assert stopped["c"] == "loss 3 at step 10 is number 3 of 4, and the best 2 go on"
    assert {*rule.judge(at(10, a=2.0, b=1.0, c=3.0), gone=())} == {"a", "c"}


def test_larger_is_better_if_the_mode_says_so() -> None:
    values = at(10, a=4.0, b=1.0, c=3.0)
    assert {*Halving("accuracy", first=10, mode="max").judge(values, ())} == {"b", "c"}


def test_a_job_waits_until_every_living_job_is_there() -> None:
    rule = Halving("loss", first=10)
    seen = {**at(10, a=1.0, b=2.0), "c": {}}
    assert rule.waits("a", seen, ["a", "b", "c"])
    assert rule.judge(seen, ()) == {}
    assert not rule.waits("a", seen, ["a", "b"])
    assert {*rule.judge(seen, {"c"})} == {"b"}


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"metric": ""}, "metric is ''"),
        ({"eta": 1}, "eta is 1"),
        ({"eta": 2.5}, "eta is 2.5"),
        ({"first": 0}, "first is 0"),
        ({"first": True}, "first is True"),
        ({"mode": "least"}, "mode is 'least'"),
    ],
)
def test_a_wrong_argument_is_named_with_its_value(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=f"Halving: {said}.*give"):
        Halving(**{"metric": "loss", **wrong})  # pyright: ignore[reportArgumentType]
