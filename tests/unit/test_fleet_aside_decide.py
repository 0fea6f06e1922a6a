"""A step stands aside for jobs of higher priority: what the fleet decides then."""

import pytest
from support.fleet_told import ended, told

from trainers.fleet.deciding.decide import decide
from trainers.fleet.deciding.events import (
    Added,
    Departed,
    Finished,
    InterruptAsked,
    JobMemory,
    Leave,
    Planned,
    Start,
    StepTimes,
    Turn,
    TurnEnded,
    Yield,
)
from trainers.fleet.deciding.fleet_state import FleetSettings


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


def test_a_job_that_needs_a_larger_arena_waits_for_the_end_of_the_step() -> None:
    fleet = FleetSettings(quantum=1)
    state, _ = told(fleet, Added("low"), big("low"), ended("low", 1, 99), Added("high", 1))
    state, _ = decide(state, aside("low"))
    state, said = decide(state, big("high", turn_bytes=11))
    assert said == (Turn("low", 0, 0, share=False),)
    state, said = decide(state, ended("low", 2, 98))
    assert said == (Turn("high", 0, 1, share=False),)


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


def test_an_interrupt_first_lets_a_step_end_that_stands_aside() -> None:
    fleet = FleetSettings(quantum=1)
    state, _ = told(fleet, Added("low"), big("low"), ended("low", 1, 99), Added("high", 1))
    state, _ = decide(state, aside("low"))
    state, _ = decide(state, big("high"))
    state, said = decide(state, InterruptAsked())
    assert not said
    state, said = decide(state, ended("high", 1, 99))
    assert said == (Leave("low", 0, "interrupted"),)
    state, said = decide(state, Departed("low", 0, 2))
    assert said == (Leave("high", 0, "interrupted"),)


def test_a_job_that_waits_for_input_of_the_one_that_stands_aside_lets_it_go_on() -> None:
    fleet = FleetSettings(quantum=1)
    state, _ = told(fleet, Added("low"), big("low"), ended("low", 1, 99), Added("high", 1))
    state, _ = decide(state, aside("low"))
    state, _ = decide(state, big("high"))
    waits = TurnEnded("high", 0, 1, 1, 99, 1.0, 0.0, None, waits_for=("low",))
    state, said = decide(state, waits)
    assert said == (Turn("low", 0, 0, share=False),)
    state, said = decide(state, ended("low", 2, 98))
    assert said == (Turn("high", 0, 1, share=False),)
