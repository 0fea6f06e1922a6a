"""Applies an event to a state, before any decision.

A device is free as soon as it has answered. A job that reports a rung a second time, because it was
restarted from an older checkpoint, keeps the value that it reported first.
"""

import math
from dataclasses import replace

from offload.sizes import format_count
from trainers.fleet.deciding.admission import why_it_never_fits
from trainers.fleet.deciding.events import (
    Added,
    Departed,
    DeviceEnded,
    Event,
    Failed,
    Finished,
    FleetError,
    InterruptAsked,
    Planned,
    Restarted,
    StopAsked,
    TimeChecked,
    Turn,
    TurnEnded,
)
from trainers.fleet.deciding.fleet_state import FleetState, JobExit, JobPlan, JobState
from trainers.fleet.deciding.schedule import stop_waiting_for

NEWEST_WEIGHT = 0.5
MOST_ENDED_DEVICES = 2
"""A job that ran on this many devices while they ended is not started again."""


def apply_event(state: FleetState, event: Event) -> FleetState:
    """Return the state after an event."""
    device = getattr(event, "device", None)
    if device is not None and not 0 <= device < state.settings.devices:
        raise FleetError(
            f"the journal has an event of device {device}, and there are {state.settings.devices}:"
            " replay it with as many devices as it was written with"
        )
    match event:
        case Added():
            if event.job in state.jobs:
                raise FleetError(f"job {event.job!r} was added twice: give each job its own name")
            added = JobState(event.job, priority=event.priority, least=event.least, most=event.most)
            return state.with_jobs(added)
        case InterruptAsked():
            return replace(state, interrupted="interrupted")
        case TimeChecked():
            return _apply_time(state, event.seconds)
        case Restarted():
            return _restart(state)
        case DeviceEnded():
            return _end_device(state, event)
        case _:
            pass
    job = state.jobs.get(event.job)
    if job is None:
        raise FleetError(
            f"the journal has an event of job {event.job!r}, which was never added: use another"
            " folder"
        )
    match event:
        case Planned():
            return _apply_plan(_free_device(state, job), job, event)
        case TurnEnded():
            return _end_turn(state, job, event)
        case Finished():
            values = _record_metric(state, job, event.step, event.metric).rungs.values
            seconds = job.turns.seconds + event.seconds
            job = _without_device(job)
            job = replace(
                job, phase="finished", step=event.step, left=0, metric=event.metric, reason="",
                rungs=replace(job.rungs, values=values), turns=replace(job.turns, seconds=seconds),
            )  # fmt: skip
        case Failed():
            job = _fail(job, event.error, event.details)
        case Departed():
            state = replace(state, leave_seconds=max(state.leave_seconds, event.seconds))
            if not _rungs_between(state, job, event.step):  # else `Planned` will report the rung
                job = replace(job, step=event.step, left=job.left + job.step - event.step)
            job = _depart(state, job)
        case StopAsked():
            return _ask_to_stop(state, job, event.why)
    return _free_device(state, job).with_jobs(job)


def _apply_plan(state: FleetState, job: JobState, event: Planned) -> FleetState:
    before, times = job, event.times
    is_measured = job.plan.is_measured
    if is_measured:
        times = replace(times, step_seconds=job.step_seconds)
    plan = JobPlan(
        event.memory, times, is_measured, event.seconds_by_devices,
        start_seconds=event.seconds, about=event.about,
    )  # fmt: skip
    job = replace(
        _record_metric(state, job, event.step, event.metric),
        phase="lobby",
        reason="",
        step=event.step,
        left=event.left,
        plan=plan,
        exit=replace(job.exit, target=None, width=1),
        turns=replace(job.turns, input=event.input),
    )
    wrong = why_it_never_fits(event.memory, state.settings)
    if wrong and not job.exit.kind and job.width > job.least:  # it goes back to fewer devices
        job = replace(job, most=job.least, exit=JobExit("moved", wrong))
        return state.with_jobs(job)
    if wrong and not job.exit.kind:
        return state.with_jobs(replace(job, exit=JobExit("failed", wrong)))
    # A checkpoint is written before the end of its turn is reported, so a kill may lose a report.
    job = replace(_stand_at_rung(state, before, job, ""), phase="lobby")
    if job.exit.kind == "failed":
        return state.with_jobs(job)
    return replace(state.with_jobs(job), queue=(*state.queue, job.name))


def _end_turn(state: FleetState, job: JobState, event: TurnEnded) -> FleetState:
    command = state.busy[event.device]
    is_shared = isinstance(command, Turn) and command.share
    state, times = _free_device(state, job), job.plan.times
    if event.steps > 0:
        step_seconds = (event.seconds + (times.tail_seconds if is_shared else 0.0)) / event.steps
        if job.plan.is_measured:
            step_seconds = NEWEST_WEIGHT * step_seconds + (1 - NEWEST_WEIGHT) * times.step_seconds
        times = replace(times, step_seconds=step_seconds)
        job = replace(job, plan=replace(job.plan, times=times, is_measured=True))
    turns = replace(job.turns, seconds=job.turns.seconds + event.seconds)
    if event.aside:
        why = "a step stands aside for a job of higher priority"
        turns = replace(turns, is_aside=True)
        return state.with_jobs(replace(job, phase="ready", reason=why, turns=turns))
    before = job
    times = replace(times, swap_seconds=event.swap_seconds or times.swap_seconds)
    job = replace(
        _record_metric(state, job, event.step, event.metric),
        phase="ready",
        step=event.step,
        left=event.left,
        metric=event.metric,
        plan=replace(job.plan, times=times),
        turns=replace(
            turns,
            tail_left=times.tail_seconds if is_shared else 0.0,
            input=event.input,
            waits_for=event.waits_for,
        ),
    )
    job = _stand_at_rung(state, before, job, event.instead)
    passed = event.seconds + event.swap_seconds
    others = [
        replace(
            other,
            turns=replace(other.turns, tail_left=max(0.0, other.turns.tail_left - passed)),
        )
        for other in state.jobs.values()
        if other.device == event.device and other.turns.tail_left > 0 and other.name != job.name
    ]
    return stop_waiting_for(state.with_jobs(job, *others), job.name)


def _rungs_between(state: FleetState, job: JobState, step: int) -> list[int]:
    """Return the rungs after the steps of `job`, up to `step`."""
    rule = state.settings.rule
    rungs: list[int] = []
    rung = rule.next_look(job.step) if rule is not None else None
    while rule is not None and rung is not None and rung <= step:
        rungs.append(rung)
        rung = rule.next_look(rung)
    return rungs


def _record_metric(state: FleetState, job: JobState, step: int, metric: float | None) -> JobState:
    """Record the metric at the rungs up to `step`, with a remark if it was different before."""
    rungs = job.rungs
    for rung in _rungs_between(state, job, step):
        first = rungs.values.get(rung)
        if first is None:
            if metric is not None:
                rungs = replace(rungs, values={**rungs.values, rung: metric})
        elif metric is None or not (metric == first or (math.isnan(metric) and math.isnan(first))):
            name = state.settings.rule.metric if state.settings.rule else "metric"
            now = "was not logged" if metric is None else f"is {metric!r}"
            remark = (
                f"at step {rung} {name} was {first!r}, and {now} after a restart: not the same run"
            )
            rungs = replace(rungs, remarks=tuple(dict.fromkeys((*rungs.remarks, remark))))
    return replace(job, rungs=rungs)


def _stand_at_rung(state: FleetState, before: JobState, job: JobState, instead: str) -> JobState:
    """Return the job after a turn. `instead`: what it has logged in place of the metric."""
    passed = job.rungs.passed
    rungs = [rung for rung in _rungs_between(state, before, job.step) if rung > passed]
    if not rungs or job.exit.kind in ("stopped", "failed") or state.settings.rule is None:
        return job
    job = replace(job, exit=JobExit())  # a job that stands at a rung moves later
    if rungs[-1] not in job.rungs.values:
        name = state.settings.rule.metric
        error = (
            f"{name} was never logged by step {rungs[-1]}, where jobs are compared by it"
            f"{f' ({instead} was logged)' if instead else ''}: log it with self.log({name!r}, ...)"
            " before that step, or give the stop rule another metric"
        )
        return replace(job, exit=JobExit("failed", error))
    if job.left <= 0:  # it is at its end: nothing is saved by stopping it
        return replace(job, rungs=replace(job.rungs, passed=rungs[-1]))
    return replace(job, phase="at_rung", rungs=replace(job.rungs, rung=rungs[-1]))


def _depart(state: FleetState, job: JobState) -> JobState:
    """Return a job that has freed its device and its memory."""
    if job.exit.kind == "failed":
        return _fail(job, job.exit.why, job.exit.details)
    if job.exit.kind == "stopped":
        return replace(_without_device(job), phase="stopped", reason=job.exit.why)
    if state.interrupted:
        return _park(job, f"{state.interrupted} at step {job.step}")
    if (target := job.exit.target) is None:
        return _park(job, f"left at step {job.step}, so that others have its memory")
    return replace(
        job,
        phase="waiting",
        device=None,
        reason=f"moves to device {target}",
        exit=JobExit(target=target, width=job.exit.width),
        turns=replace(job.turns, tail_left=0.0, waits_for=()),
    )


def _park(job: JobState, reason: str) -> JobState:
    """Return a job that has no device and is started again later, if its rung allows it."""
    phase = "waiting" if job.rungs.rung is None else "at_rung"
    return replace(_without_device(job), phase=phase, reason=reason)


def _fail(job: JobState, error: str, details: str) -> JobState:
    exit = JobExit("failed", error, details=details)
    return replace(_without_device(job), phase="failed", exit=exit, reason=error)


def _without_device(job: JobState) -> JobState:
    """Return a job without device and memory."""
    return replace(
        job,
        device=None,
        plan=replace(job.plan, is_admitted=False),
        exit=JobExit(),
        turns=replace(job.turns, waited=0, tail_left=0.0, is_aside=False, waits_for=()),
    )


def _free_device(state: FleetState, job: JobState) -> FleetState:
    """Return the state in which the device that was busy with `job` is free."""
    busy = tuple(None if c is not None and c.job == job.name else c for c in state.busy)
    return replace(state, busy=busy, queue=_without_name(state.queue, job.name))


def _without_name(queue: tuple[str, ...], name: str) -> tuple[str, ...]:
    return tuple(other for other in queue if other != name)


def _ask_to_stop(state: FleetState, job: JobState, why: str) -> FleetState:
    if not job.alive:
        return state
    if job.device is None:
        return state.with_jobs(replace(_without_device(job), phase="stopped", reason=why))
    state = state.with_jobs(replace(job, exit=JobExit("stopped", why, job.exit.target)))
    return replace(state, queue=_without_name(state.queue, job.name))


def _apply_time(state: FleetState, seconds: float) -> FleetState:
    limit = state.settings.seconds
    if limit is None or seconds < limit or state.interrupted:
        return state
    why = f"the {limit / 3600:.3g} h were over"
    resting = [job for job in state.jobs.values() if not job.ended and job.device is None]
    state = state.with_jobs(*[replace(job, reason=f"{why} at step {job.step}") for job in resting])
    return replace(state, interrupted=why)


def _end_device(state: FleetState, event: DeviceEnded) -> FleetState:
    command = state.busy[event.device]
    running = event.job or (command.job if command is not None else None)
    why = f"device {event.device} ended: {event.why}"
    for job in [job for job in state.jobs.values() if job.device == event.device]:
        state = _free_device(state, job)
        count = job.turns.ended_devices + (job.name == running)
        job = replace(job, turns=replace(job.turns, ended_devices=count))
        is_suspect = job.name == running and count >= MOST_ENDED_DEVICES
        if is_suspect and job.exit.kind != "stopped":
            error = f"{why}; it ran this job, and so did a device that ended before"
            job = _fail(job, error, "")
        elif job.alive:
            job = _park(job, f"{why}; it starts again")
        else:
            job = _depart(state, job)
        state = state.with_jobs(job)
    busy = tuple(None if d == event.device else c for d, c in enumerate(state.busy))
    last = tuple(None if d == event.device else n for d, n in enumerate(state.last))
    return replace(state, busy=busy, last=last)


def _restart(state: FleetState) -> FleetState:
    """Return the state in which no job is on a device. The settings may have changed before."""
    jobs: list[JobState] = []
    for job in state.jobs.values():
        if job.ended:
            continue
        if job.alive:
            done = f"starts again; it had done {format_count(job.step, 'step')}"
            jobs.append(_park(job, done if job.step else ""))
        else:
            jobs.append(_depart(state, job))
    free = (None,) * state.settings.devices
    return replace(
        state.with_jobs(*jobs), busy=free, last=free, queue=(), passers=(), interrupted=""
    )
