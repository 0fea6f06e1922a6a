"""What an event changes in a state, before anybody decides anything.

A device is free as soon as it has answered. A job that reports a rung a second time, because it was
started again from an older snapshot, is compared with what it reported first.
"""

import math
from dataclasses import replace

from offload.sizes import say_count
from trainers.fleet.deciding.admission import never_fits
from trainers.fleet.deciding.awaiting import had_turn
from trainers.fleet.deciding.events import (
    Added,
    DeviceEnded,
    Event,
    Failed,
    Finished,
    InterruptAsked,
    Left,
    Planned,
    Restarted,
    StopAsked,
    TimeTold,
    Turn,
    TurnEnded,
)
from trainers.fleet.deciding.fleet_error import FleetError
from trainers.fleet.deciding.fleet_state import FleetState, JobState

NEWEST = 0.5
"""How much of a step's seconds comes from the newest turn."""
TWICE = 2
"""A job that ran on so many devices while they ended is not started again."""


def heard(state: FleetState, event: Event) -> FleetState:
    """The state in which an event has happened."""
    device = getattr(event, "device", None)
    if device is not None and not 0 <= device < state.settings.devices:
        raise FleetError(
            f"the journal speaks of device {device}, and there are {state.settings.devices}: replay"
            " it with as many devices as it was written with"
        )
    match event:
        case Added():
            if event.job in state.jobs:
                raise FleetError(f"job {event.job!r} was added twice: give each job its own name")
            return state.put(JobState(event.job, priority=event.priority))
        case InterruptAsked():
            return replace(state, interrupted="interrupted")
        case TimeTold():
            return _time_told(state, event.seconds)
        case Restarted():
            return _restarted(state)
        case DeviceEnded():
            return _device_ended(state, event)
        case _:
            pass
    job = state.jobs.get(event.job)
    if job is None:
        raise FleetError(
            f"the journal speaks of job {event.job!r}, which was never added: use another folder"
        )
    match event:
        case Planned():
            return _planned(_freed(state, job), job, event)
        case TurnEnded():
            return _turn_ended(state, job, event)
        case Finished():
            values = _recorded(state, job, event.step, event.metric).values
            gone = replace(
                _gone(job), phase="finished", step=event.step, left=0, metric=event.metric,
                values=values, seconds=job.seconds + event.seconds, reason="",
            )  # fmt: skip
            return _freed(state, job).put(gone)
        case Failed():
            return _freed(state, job).put(_failed(job, event.error, event.details))
        case Left():
            state = replace(state, leave_seconds=max(state.leave_seconds, event.seconds))
            if not _rungs(state, job, event.step):  # else it reports the rung when it is planned
                job = replace(job, step=event.step, left=job.left + job.step - event.step)
            return _freed(state, job).put(_left(state, job))
        case StopAsked():
            return _stop_asked(state, job, event.why)


def _planned(state: FleetState, job: JobState, event: Planned) -> FleetState:
    moved, before = job.target is not None, job
    job = replace(
        _recorded(state, job, event.step, event.metric),
        step=event.step,
        left=event.left,
        tail_seconds=event.tail_seconds,
        swap_seconds=event.swap_seconds,
        step_seconds=job.step_seconds if job.measured else event.step_seconds,
        start_seconds=event.seconds,
        memory=event.memory,
        about=event.about,
        input=event.input,
        phase="lobby",
        reason="",
        admitted=False,
        target=None,
        moves=job.moves + moved,
    )
    if (wrong := never_fits(event.memory, state.settings)) and not job.ending:
        return state.put(replace(job, ending="failed", ending_why=wrong, error=wrong))
    # A checkpoint is written before the end of its turn is reported, so a kill may lose a report.
    job = replace(_at_rung(state, before, job, ""), phase="lobby")
    if job.ending == "failed":
        return state.put(job)
    return replace(state.put(job), queue=(*state.queue, job.name))


def _turn_ended(state: FleetState, job: JobState, event: TurnEnded) -> FleetState:
    command = state.busy[event.device]
    shared = isinstance(command, Turn) and command.share
    state = _freed(state, job)
    seconds = event.seconds + (job.tail_seconds if shared else 0.0)
    if event.steps > 0:
        new = seconds / event.steps
        new = NEWEST * new + (1 - NEWEST) * job.step_seconds if job.measured else new
        job = replace(job, step_seconds=new, measured=True)
    if event.aside:
        why = "a step stands aside for a job of higher priority"
        seconds = job.seconds + event.seconds
        return state.put(replace(job, phase="ready", reason=why, aside=True, seconds=seconds))
    before = job
    job = replace(
        _recorded(state, job, event.step, event.metric),
        phase="ready",
        step=event.step,
        left=event.left,
        metric=event.metric,
        seconds=job.seconds + event.seconds,
        swap_seconds=event.swap_seconds or job.swap_seconds,
        tail_left=job.tail_seconds if shared else 0.0,
        input=event.input,
        waits_for=event.waits_for,
    )
    job = _at_rung(state, before, job, event.instead)
    others = [
        replace(other, tail_left=max(0.0, other.tail_left - event.seconds - event.swap_seconds))
        for other in state.jobs.values()
        if other.device == event.device and other.tail_left > 0 and other.name != job.name
    ]
    return had_turn(state.put(job, *others), job.name)


def _rungs(state: FleetState, job: JobState, step: int) -> list[int]:
    """The rungs after what `job` had done, up to `step`."""
    rule, found = state.settings.rule, []
    rung = rule.next_look(job.step) if rule is not None else None
    while rule is not None and rung is not None and rung <= step:
        found.append(rung)
        rung = rule.next_look(rung)
    return found


def _recorded(state: FleetState, job: JobState, step: int, metric: float | None) -> JobState:
    """The job with what it reports at the rungs up to `step`; it says what differs from before."""
    for rung in _rungs(state, job, step):
        first = job.values.get(rung)
        if first is None:
            if metric is not None:
                job = replace(job, values={**job.values, rung: metric})
        elif metric is None or not (metric == first or (math.isnan(metric) and math.isnan(first))):
            name = state.settings.rule.metric if state.settings.rule else "metric"
            now = "was not logged" if metric is None else f"is {metric!r}"
            remark = (
                f"at step {rung} {name} was {first!r}, and {now} after a restart: not the same run"
            )
            job = replace(job, remarks=tuple(dict.fromkeys((*job.remarks, remark))))
    return job


def _at_rung(state: FleetState, before: JobState, job: JobState, instead: str) -> JobState:
    """The job as it stands after a turn: at a rung, or failed there, or ready. `instead`: what it
    has logged if it has not logged the metric."""
    rungs = [r for r in _rungs(state, before, job.step) if r > job.passed]
    if not rungs or job.ending in ("stopped", "failed") or state.settings.rule is None:
        return job
    job = replace(job, ending="", ending_why="", target=None)  # who stands at a rung moves later
    if rungs[-1] not in job.values:
        name = state.settings.rule.metric
        error = (
            f"{name} was never logged by step {rungs[-1]}, where jobs are compared by it"
            f"{f' ({instead} was logged)' if instead else ''}: log it with self.log({name!r}, ...)"
            " before that step, or give the stop rule another metric"
        )
        return replace(job, ending="failed", ending_why=error, error=error)
    if job.left <= 0:
        return replace(job, passed=rungs[-1])  # it is at its end: nothing is saved by stopping it
    return replace(job, phase="at_rung", rung=rungs[-1])


def _left(state: FleetState, job: JobState) -> JobState:
    """A job after it has given everything back."""
    if job.ending == "failed":
        return _failed(job, job.error, job.details)
    if job.ending == "stopped":
        return replace(_gone(job), phase="stopped", reason=job.ending_why)
    if state.interrupted:
        return _parked(job, f"{state.interrupted} at step {job.step}")
    if job.target is None:
        return _parked(job, f"left at step {job.step}, so that others have its memory")
    return replace(
        job, phase="waiting", device=None, ending="", ending_why="", tail_left=0.0, waits_for=(),
        reason=f"moves to device {job.target}",
    )  # fmt: skip


def _parked(job: JobState, reason: str) -> JobState:
    """A job that lives nowhere now and will be started again, if its rung lets it."""
    phase = "waiting" if job.rung is None else "at_rung"
    return replace(_gone(job), phase=phase, reason=reason)


def _gone(job: JobState) -> JobState:
    """A job without device and memory."""
    return replace(
        job, device=None, target=None, admitted=False, ending="", ending_why="", waited=0,
        tail_left=0.0, aside=False, waits_for=(),
    )  # fmt: skip


def _failed(job: JobState, error: str, details: str) -> JobState:
    return replace(_gone(job), phase="failed", error=error, details=details, reason=error)


def _freed(state: FleetState, job: JobState) -> FleetState:
    """The state in which the device that was busy with `job` is free, and nobody queues for it."""
    busy = tuple(None if c is not None and c.job == job.name else c for c in state.busy)
    queue = tuple(name for name in state.queue if name != job.name)
    return replace(state, busy=busy, queue=queue)


def _stop_asked(state: FleetState, job: JobState, why: str) -> FleetState:
    if job.ended or job.ending in ("stopped", "failed"):
        return state
    if job.device is None:
        return state.put(replace(_gone(job), phase="stopped", reason=why))
    queue = tuple(name for name in state.queue if name != job.name)
    return replace(state.put(replace(job, ending="stopped", ending_why=why)), queue=queue)


def _time_told(state: FleetState, seconds: float) -> FleetState:
    limit = state.settings.seconds
    if limit is None or seconds < limit or state.interrupted:
        return state
    said = f"the {limit / 3600:.3g} h were over"
    resting = [job for job in state.jobs.values() if not job.ended and job.device is None]
    state = state.put(*[replace(job, reason=f"{said} at step {job.step}") for job in resting])
    return replace(state, interrupted=said)


def _device_ended(state: FleetState, event: DeviceEnded) -> FleetState:
    command = state.busy[event.device]
    ran = event.job or (command.job if command is not None else None)
    for job in [job for job in state.jobs.values() if job.device == event.device]:
        state = _freed(state, job)
        said = f"device {event.device} ended: {event.why}"
        count = job.ended_devices + (job.name == ran)
        job = replace(job, ended_devices=count)
        if job.name == ran and count >= TWICE and job.ending != "stopped":
            error = f"{said}; it ran this job, and so did a device that ended before"
            job = _failed(job, error, "")
        elif job.ending in ("stopped", "failed"):
            job = _left(state, job)
        else:
            job = _parked(job, f"{said}; it starts again")
        state = state.put(job)
    busy = tuple(None if d == event.device else c for d, c in enumerate(state.busy))
    last = tuple(None if d == event.device else n for d, n in enumerate(state.last))
    return replace(state, busy=busy, last=last)


def _restarted(state: FleetState) -> FleetState:
    """All jobs that have not ended live nowhere. `settings` may be others than before."""
    jobs = []
    for job in state.jobs.values():
        if job.ended:
            continue
        if job.ending in ("stopped", "failed"):
            jobs.append(_left(state, job))
        else:
            done = f"starts again; it had done {say_count(job.step, 'step')}"
            jobs.append(_parked(job, done if job.step else ""))
    free = (None,) * state.settings.devices
    return replace(state.put(*jobs), busy=free, last=free, queue=(), passers=(), interrupted="")
