"""Events of a fleet in short, and what it says to them."""

from trainers.fleet.deciding.decide import decide
from trainers.fleet.deciding.events import Event, JobMemory, Planned, StepTimes, TurnEnded
from trainers.fleet.deciding.fleet_state import FleetSettings, FleetState


def planned(
    job: str,
    device: int = 0,
    step: int = 0,
    left: int = 100,
    tail: float = 0.0,
    metric: float | None = None,
) -> Planned:
    return Planned(job, device, step, left, StepTimes(1.0, tail, 0.01), JobMemory(1), metric=metric)


def ended(
    job: str, step: int, left: int, metric: float | None = None, device: int = 0,
    waits_for: tuple[str, ...] = (),
) -> TurnEnded:  # fmt: skip
    return TurnEnded(job, device, step, 1, left, 1.0, 0.0, metric, waits_for=waits_for)


def told(fleet: FleetSettings, *events: Event) -> tuple[FleetState, list[object]]:
    """The state after the events, and what was said to the last of them."""
    state, commands = FleetState.without_jobs(fleet), ()
    for event in events:
        state, commands = decide(state, event)
    return state, [*commands]
