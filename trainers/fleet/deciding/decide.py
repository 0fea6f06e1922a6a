"""From a state and an event to the next state and commands."""

from dataclasses import replace
from typing import Any

from trainers.fleet.deciding.events import (
    Added,
    Command,
    Event,
    Failed,
    Finished,
    InterruptAsked,
    Leave,
    Left,
    Planned,
    Restarted,
    Start,
    StopAsked,
    Turn,
    TurnEnded,
)
from trainers.fleet.deciding.fleet_state import FleetState, JobState

STEPS = 10


def decide(state: FleetState, event: Event) -> tuple[FleetState, tuple[Command, ...]]:
    """The state after an event, and what devices should do now."""
    jobs = dict(state.jobs)
    busy: list[Command | None] = [*state.busy]

    def put(name: str, **changes: Any) -> None:
        jobs[name] = replace(jobs[name], **changes)

    interrupted = state.interrupted
    device = getattr(event, "device", None)
    if device is not None:
        busy[device] = None
    match event:
        case Added():
            jobs[event.job] = JobState(event.job)
        case Planned():
            put(event.job, phase="ready", step=event.step, left=event.left, memory=event.memory)
        case TurnEnded():
            put(event.job, phase="ready", step=event.step, left=event.left, metric=event.metric)
        case Finished():
            put(event.job, phase="finished", step=event.step, metric=event.metric, device=None)
        case Failed():
            put(event.job, phase="failed", error=event.error, details=event.details, device=None)
        case Left():
            over = "stopped" if jobs[event.job].ending == "stopped" else "waiting"
            put(event.job, phase=over, step=event.step, device=None)
        case StopAsked():
            put(event.job, ending="stopped")
        case InterruptAsked():
            interrupted = True
        case Restarted():
            interrupted = False
            busy[:] = [None for _ in busy]
        case _:
            pass
    commands: list[Command] = []
    for number, doing in enumerate(busy):
        if doing is not None:
            continue
        here = [job for job in jobs.values() if job.device == number and job.phase == "ready"]
        ready = sorted(here, key=lambda job: -job.waited)
        leaving = [job for job in here if interrupted or job.ending]
        new = [job.name for job in jobs.values() if job.phase == "waiting" and not interrupted]
        if leaving:
            name = leaving[0].name
            command: Command = Leave(name, number, "interrupted" if interrupted else "stopped")
            put(name, phase="leaving")
        elif new:
            command = Start(new[0], number)
            put(new[0], phase="starting", device=number)
        elif ready:
            command = Turn(ready[0].name, number, max(1, min(STEPS, ready[0].left)), share=False)
            for job in ready[1:]:
                put(job.name, waited=job.waited + 1)
            put(ready[0].name, phase="running", waited=0)
        else:
            continue
        busy[number] = command
        commands.append(command)
    return replace(state, jobs=jobs, busy=tuple(busy), interrupted=interrupted), tuple(commands)
