"""Decides: from a state and an event to the next state and commands. Nothing else counts.

event    what happened                                       reports.py
  which jobs of the lobby have room?                         admission.py
  which jobs stop at their rung, which go on?                the stop rule
  for each free device where a step stands aside:
    as below, but only for jobs of higher priority
    else                                                     Turn: the rest of the step
  a job moves onto more devices, for which none waits        device_sets.py
  for each other free device, the first of these:
    a job here has to leave, also for one that needs several Leave
    a job is moving here, or was never started               Start
    a job waits for memory, and one here for its rung        Leave
    a job here can train                                     Turn     schedule.py
    a job elsewhere is better off here                       Leave, there
  for each device that trains:
    a job of higher priority waits for it                    Yield, in mid-step if that is soon
commands
"""

from dataclasses import replace

from trainers.fleet.deciding.admission import (
    admit_jobs,
    can_stand_aside,
    fits_into_arena,
    lacks_room,
    why_not_start,
)
from trainers.fleet.deciding.device_sets import (
    job_to_make_room_for,
    reserved_devices,
    start_width,
    wide_jobs,
    widen_job,
)
from trainers.fleet.deciding.events import Command, Event, FleetError, Leave, Start, Turn, Yield
from trainers.fleet.deciding.fleet_state import FleetState, JobExit, JobState
from trainers.fleet.deciding.reports import apply_event
from trainers.fleet.deciding.schedule import (
    Runnable,
    assign_shares,
    effective_priority,
    ends_soon,
    job_to_even_out,
    job_to_fetch,
    job_to_hurry,
    job_to_run_instead,
    pick_job,
    seconds_left,
    turn_seconds,
    turn_steps,
    worth_standing_aside,
)


def decide(state: FleetState, event: Event) -> tuple[FleetState, tuple[Command, ...]]:
    """Return the state after an event, and the commands for the devices."""
    state = apply_event(state, event)
    _check_rungs(state)
    state = widen_job(judge_rungs(admit_jobs(state)))
    commands: list[Command] = []
    for device in range(state.settings.devices):
        if state.busy[device] is None:
            state, command = _next(state, device)
            if command is not None:
                commands.append(command)
    commands += _shorten_turns(state)
    _check_progress(state)
    return state, tuple(commands)


def judge_rungs(state: FleetState) -> FleetState:
    """Return the state after the verdicts on all jobs at rungs."""
    rule = state.settings.rule
    while rule is not None:
        standing = [j for j in state.jobs.values() if j.phase == "at_rung" and j.alive]
        if not standing:
            break
        seen = {job.name: job.rungs.values for job in state.jobs.values()}
        gone = {
            job.name: job.phase if job.ended else job.exit.kind
            for job in state.jobs.values()
            if not job.alive
        }
        verdicts = rule.judge(seen, gone)
        alive = [name for name in seen if name not in gone]
        changed: list[JobState] = []
        for job in standing:
            if job.name in verdicts:
                changed.append(_stop_at_rung(job, verdicts[job.name]))
            elif not rule.waits(job.name, seen, alive):
                changed.append(_pass_rung(job))
        if not changed:
            return state.with_jobs(
                *(
                    replace(job, reason=f"waits at step {job.rungs.rung} for the others")
                    for job in standing
                )
            )
        state = state.with_jobs(*changed)
    return state


def _stop_at_rung(job: JobState, why: str) -> JobState:
    if job.device is None:
        return replace(job, phase="stopped", rungs=replace(job.rungs, rung=None), reason=why)
    return replace(job, exit=JobExit("stopped", why))


def _pass_rung(job: JobState) -> JobState:
    assert job.rungs.rung is not None
    phase = "waiting" if job.device is None else "ready"
    rungs = replace(job.rungs, passed=job.rungs.rung, rung=None)
    return replace(job, phase=phase, rungs=rungs, reason="")


def _check_rungs(state: FleetState) -> None:
    """Refuse a stop rule whose first rung no job ever reaches."""
    rule = state.settings.rule
    first = rule.next_look(0) if rule is not None else None
    lengths = [job.step + job.left for job in state.jobs.values() if job.plan.memory is not None]
    unknown = any(job.plan.memory is None and not job.ended for job in state.jobs.values())
    if rule is None or first is None or unknown or not lengths or first <= max(lengths):
        return
    raise FleetError(
        f"the stop rule {rule!r} looks first at step {first}, and the longest job has"
        f" {max(lengths)} steps: nobody would ever be stopped; let it look earlier (first=), or"
        " leave the rule out"
    )


def _check_progress(state: FleetState) -> None:
    if state.jobs and not state.is_done and not any(state.busy):
        jobs = [job for job in state.jobs.values() if not job.ended]
        waits = "; ".join(f"{job.name} {job.phase}: {job.why}" for job in jobs)
        raise FleetError(f"no job can go on, because each waits ({waits}): the stop rule is wrong")


def _next(state: FleetState, device: int) -> tuple[FleetState, Command | None]:
    """Return the command for a free device."""
    here = [job for job in state.jobs.values() if job.device == device]
    for job in here:
        if job.turns.is_aside:
            return _next_beside(state, job, [other for other in here if other is not job], device)
    for job in here:
        if job.exit.kind or state.interrupted:
            return _leave(state, job, device)
    if state.interrupted:
        return state, None
    for job in state.jobs.values():
        if job.phase == "waiting" and job.exit.target == device:
            return _start(state, job, device)
    if (owner := wide_jobs(state).get(device)) is not None and owner.device != device:
        return state, None
    for job in here:
        if other := job_to_make_room_for(state, job, device):
            asked = replace(job, exit=JobExit("moved", f"leaves room for {other}"))
            return _leave(state.with_jobs(asked), asked, device)
    coming = reserved_devices(state).get(device)
    if coming is not None and not start_width(state, coming, device):
        return state, None
    ready = [job for job in here if job.phase == "ready"]
    waiting = [
        job
        for job in state.jobs.values()
        if job.phase == "waiting" and job.exit.target is None
        if all(job.priority >= other.priority for other in ready)
    ]
    startable = [job for job in waiting if start_width(state, job, device)]
    wanting = max(startable, key=lambda job: job.priority, default=None)
    if wanting is not None:
        if not (why := why_not_start(state, wanting, device)):
            return _start(state, wanting, device)
        state = state.with_jobs(replace(wanting, reason=why))
    if waiting or state.queue:
        for job in here:
            if job.phase == "at_rung":
                why = f"stands at step {job.rungs.rung}, and others wait for memory or devices"
                asked = replace(job, exit=JobExit("moved", why))
                return _leave(state.with_jobs(asked), asked, device)
    levels = {job.priority for job in state.jobs.values() if not job.ended}
    for level in sorted(levels, reverse=True):
        mine = [job for job in ready if job.priority == level]
        state, command = _train_level(state, device, mine, level)
        if command is not None:
            return state, command
    return state, None


def _next_beside(
    state: FleetState, aside: JobState, others: list[JobState], device: int
) -> tuple[FleetState, Command | None]:
    """Return the command for a device where a step of a job stands aside."""
    above = [job for job in others if job.priority > aside.priority]
    if not aside.exit.kind and not state.interrupted:
        for job in above:
            if job.exit.kind:
                return _leave(state, job, device)
        waiting = [job for job in state.jobs.values() if job.phase == "waiting"]
        for job in sorted(waiting, key=lambda job: -job.priority):
            if job.priority > aside.priority and _wants_device(state, job, device):
                return _start(state, job, device)
        ready = [job for job in above if job.phase == "ready"]
        level = max((job.priority for job in ready), default=0)
        first = [job for job in ready if job.priority == level]
        fitting = [job for job in first if _could_train_beside(state, aside, job)]
        if fitting:
            return _train_level(state, device, fitting, level)
        turns = replace(aside.turns, is_aside=False, waits_for=())
        running = replace(aside, phase="running", reason="", turns=turns)
        return _send(state.with_jobs(running), Turn(aside.name, device, 0, share=False))
    return _leave(state, aside, device)


def _could_train_beside(state: FleetState, aside: JobState, job: JobState) -> bool:
    """Return whether a job itself could train in the arena of one that stands aside."""
    return job_to_run_instead(state, job).name == job.name and fits_into_arena(job, aside)


def _leave(state: FleetState, job: JobState, device: int) -> tuple[FleetState, Command]:
    why = "moved" if job.exit.kind == "moved" else "stopped"
    why = "interrupted" if state.interrupted else why
    reason = job.exit.why or state.interrupted
    turns = replace(job.turns, is_aside=False)
    leaving = replace(job, phase="leaving", reason=reason, turns=turns)
    queue = tuple(name for name in state.queue if name != job.name)
    return _send(replace(state.with_jobs(leaving), queue=queue), Leave(job.name, device, why))


def _start(state: FleetState, job: JobState, device: int) -> tuple[FleetState, Command]:
    width = job.least if job.exit.target is None else job.exit.width
    known = job.plan.is_measured and width == job.width
    started = replace(
        job, phase="starting", device=device, width=width, reason="builds and plans",
        plan=replace(job.plan, is_measured=known),
    )  # fmt: skip
    return _send(state.with_jobs(started), Start(job.name, device, width))


def _shorten_turns(state: FleetState) -> list[Command]:
    """Return a Yield for each turn that should end early for a job of higher priority."""
    yields: list[Command] = []
    for device, command in enumerate(state.busy):
        if isinstance(command, Turn) and command.steps:
            running = state.jobs[command.job]
            least = effective_priority(state, running)
            above = [job for job in state.jobs.values() if job.priority > least]
            if wanting := [job for job in above if _wants_device(state, job, device)]:
                at_once = _should_stand_aside(state, running, command, wanting)
                yields.append(Yield(command.job, device, at_once))
            elif any(job.name == job_to_make_room_for(state, running, device) for job in above):
                yields.append(Yield(command.job, device))
    return yields


def _should_stand_aside(
    state: FleetState, running: JobState, turn: Turn, wanting: list[JobState]
) -> bool:
    """Return whether a turn should end in the middle of a step, for jobs of higher priority."""
    here = [job for job in state.jobs.values() if job.device == turn.device]
    if turn.share or any(job.turns.is_aside for job in here):
        return False
    if not can_stand_aside(state, running):
        return False
    assert running.plan.memory is not None
    could = any(
        job.phase == "waiting" or _could_train_beside(state, running, job) for job in wanting
    )
    return could and worth_standing_aside(running.step_seconds, running.plan.memory.turn_bytes)


def _wants_device(state: FleetState, job: JobState, device: int) -> bool:
    """Return whether a job would use this device if it were free."""
    if job.phase == "ready":
        comes = (
            job_to_run_instead(state, job).phase == "ready"
        )  # else its turn is the running one's
        return job.device == device and not job.exit.kind and comes
    if job.phase != "waiting" or job.exit.target not in (None, device):
        return False
    could_start = job.exit.target == device or start_width(state, job, device) > 0
    return could_start and not state.interrupted and not why_not_start(state, job, device)


def _train_level(
    state: FleetState, device: int, ready: list[JobState], level: int
) -> tuple[FleetState, Command | None]:
    """Give a turn to a job of one priority of this device, or ask one to move here."""
    numbers = _single_devices(state)
    if device not in numbers:  # its job has several devices, or none comes before those are empty
        return _give_turn(state, device, ready, ready[0]) if ready else (state, None)
    jobs = runnable_jobs(state, level)
    jobs = [replace(job, device=numbers.index(job.device)) for job in jobs if job.device in numbers]
    place, devices = numbers.index(device), len(numbers)
    shares = assign_shares(jobs, devices)[place]
    grains = {job.name: turn_seconds(job, state.settings) for job in ready}
    may_end_early = state.settings.rule is not None
    chosen = pick_job(ready, None if may_end_early else shares, state.last[device], grains)
    coming = None
    if movable := _movable(state, device, level):
        if chosen is None:
            coming = job_to_fetch(shares, movable)
        else:
            waiting = {name for name in movable if state.jobs[name].phase == "ready"}
            coming = job_to_hurry(chosen.name, jobs, waiting, devices)
            if ends_soon(shares, grains[chosen.name]):
                coming = coming or job_to_fetch(shares, waiting)
            if may_end_early:
                coming = coming or job_to_even_out(place, jobs, waiting, devices)
    if coming is not None:
        why = f"moves to device {device}, which has less to do"
        asked = replace(state.jobs[coming], exit=JobExit("moved", why, device))
        state = state.with_jobs(asked)
    if not ready:
        return state, None
    lender = chosen or max(ready, key=lambda job: job.left * job.step_seconds)
    return _give_turn(state, device, ready, lender)


def _single_devices(state: FleetState) -> list[int]:
    """Return the devices whose jobs take turns: no job has several of them, or waits for them."""
    wide, reserved = wide_jobs(state), reserved_devices(state)
    devices = range(state.settings.devices)
    return [device for device in devices if device not in wide and device not in reserved]


def _give_turn(
    state: FleetState, device: int, ready: list[JobState], lender: JobState
) -> tuple[FleetState, Command]:
    """Give a turn to this job, or to the one for which it waits."""
    chosen = job_to_run_instead(state, lender)
    is_last = all(job.ended or job.name == chosen.name for job in state.jobs.values())
    steps, share = turn_steps(chosen, ready, state.settings, is_last)
    waited = [
        replace(job, turns=replace(job.turns, waited=job.turns.waited + 1))
        for job in ready
        if job.name not in (lender.name, chosen.name)
    ]
    turns = replace(chosen.turns, waited=0, tail_left=0.0, waits_for=())
    running = replace(chosen, phase="running", reason="", turns=turns)
    last = tuple(chosen.name if d == device else name for d, name in enumerate(state.last))
    state = replace(state.with_jobs(running, *waited), last=last)
    return _send(state, Turn(chosen.name, device, steps, share, chosen.turns.waits_for))


def _movable(state: FleetState, device: int, level: int) -> set[str]:
    """Return the jobs of a priority that could move here; none while one is moving already."""
    if any(job.exit.target == device for job in state.jobs.values()):
        return set()
    return {
        job.name
        for job in state.jobs.values()
        if job.priority == level
        if job.phase in ("ready", "running") and not job.exit.kind and job.device != device
        if job.width == 1
        if not job.turns.is_aside
        if not lacks_room(state, job, device)
    }


def runnable_jobs(state: FleetState, level: int) -> list[Runnable]:
    """Return the jobs of a priority that train or will soon, with the time that is left."""
    waited_for = any(job.phase == "at_rung" for job in state.jobs.values())
    default = state.settings.move_seconds
    return [
        Runnable(
            job.name,
            place,
            seconds_left(job, state.settings, waited_for),
            turn_seconds(job, state.settings),
            job.plan.start_seconds + state.leave_seconds if job.plan.start_seconds else default,
        )
        for job in state.jobs.values()
        if job.priority == level
        if job.phase in ("ready", "running", "starting", "leaving", "waiting")
        if job.exit.kind in ("", "moved")
        if (place := job.exit.target if job.exit.target is not None else job.device) is not None
    ]


def _send(state: FleetState, command: Command) -> tuple[FleetState, Command]:
    busy = tuple(command if d == command.device else c for d, c in enumerate(state.busy))
    return replace(state, busy=busy), command
