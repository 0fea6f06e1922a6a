"""From a state and an event to the next state and commands. It is a function: nothing else counts.

    event    what happened                                       reports.py
      who of the lobby has room?                                 admission.py
      who stops at its rung, who goes on?                        the stop rule
      for each free device where a step stands aside:
        as below, but only for jobs of higher priority
        nothing of that                                          Turn: the rest of the step
      for each other free device, the first of these:
        somebody here has to leave                               Leave
        somebody is moving here, or was never started            Start
        somebody waits for memory, and one here for its rung     Leave
        somebody here can train                                  Turn     schedule.py, quantum.py,
                                                                          awaiting.py
        somebody elsewhere is better off here                    Leave, there
      for each device that trains:
        somebody of higher priority waits for it                 Yield, in mid-step if that is soon
    commands

So a journal of events, told again, gives the same state and the same commands.
"""

from dataclasses import replace

from trainers.fleet.deciding.admission import (
    admitted,
    can_stand_aside,
    lacks_room,
    lets_in,
    likely,
)
from trainers.fleet.deciding.awaiting import giver, weight
from trainers.fleet.deciding.events import Command, Event, Leave, Start, Turn, Yield
from trainers.fleet.deciding.fleet_error import FleetError
from trainers.fleet.deciding.fleet_state import FleetState, JobState
from trainers.fleet.deciding.quantum import turn_seconds, turn_steps, worth_standing_aside
from trainers.fleet.deciding.reports import heard
from trainers.fleet.deciding.schedule import (
    Runnable,
    ends_soon,
    even,
    lay,
    pick,
    pull,
    remaining,
    urgent,
)


def decide(state: FleetState, event: Event) -> tuple[FleetState, tuple[Command, ...]]:
    """The state after an event, and what devices should do now."""
    state = heard(state, event)
    _check_rungs(state)
    state = judged(admitted(state))
    commands: list[Command] = []
    for device in range(state.settings.devices):
        if state.busy[device] is None:
            state, command = _next(state, device)
            if command is not None:
                commands.append(command)
    commands += _cut_short(state)
    _check_progress(state)
    return state, tuple(commands)


# ---- rungs --------------------------------------------------------------------------------------


def judged(state: FleetState) -> FleetState:
    """The state in which every job that stands at a rung waits there for a reason."""
    rule = state.settings.rule
    while rule is not None:
        standing = [j for j in state.jobs.values() if j.phase == "at_rung" and j.alive]
        if not standing:
            break
        seen = {job.name: job.values for job in state.jobs.values()}
        gone = {
            job.name: job.phase if job.ended else job.ending
            for job in state.jobs.values()
            if not job.alive
        }
        verdicts = rule.judge(seen, gone)
        alive = [name for name in seen if name not in gone]
        changed: list[JobState] = []
        for job in standing:
            if job.name in verdicts:
                changed.append(_stopped(job, verdicts[job.name]))
            elif not rule.waits(job.name, seen, alive):
                changed.append(_goes_on(job))
        if not changed:
            said = [replace(j, reason=f"waits at step {j.rung} for the others") for j in standing]
            return state.put(*said)
        state = state.put(*changed)
    return state


def _stopped(job: JobState, why: str) -> JobState:
    if job.device is None:
        return replace(job, phase="stopped", rung=None, reason=why)
    return replace(job, ending="stopped", ending_why=why)


def _goes_on(job: JobState) -> JobState:
    assert job.rung is not None
    phase = "waiting" if job.device is None else "ready"
    return replace(job, phase=phase, passed=job.rung, rung=None, reason="")


def _check_rungs(state: FleetState) -> None:
    """A first rung that no job ever reaches is a mistake in the stop rule."""
    rule = state.settings.rule
    first = rule.next_look(0) if rule is not None else None
    lengths = [job.step + job.left for job in state.jobs.values() if job.memory is not None]
    unknown = any(job.memory is None and not job.ended for job in state.jobs.values())
    if rule is None or first is None or unknown or not lengths or first <= max(lengths):
        return
    raise FleetError(
        f"the stop rule {rule!r} looks first at step {first}, and the longest job has"
        f" {max(lengths)} steps: nobody would ever be stopped; let it look earlier (first=), or"
        " leave the rule out"
    )


def _check_progress(state: FleetState) -> None:
    if state.jobs and not state.over and not any(state.busy):
        said = "; ".join(f"{j.name} {j.phase}: {j.why}" for j in state.jobs.values() if not j.ended)
        raise FleetError(
            f"no job can go on, because each waits ({said}): this is a stop rule's fault"
        )


# ---- a free device ------------------------------------------------------------------------------


def _next(state: FleetState, device: int) -> tuple[FleetState, Command | None]:
    """What a free device does now."""
    here = [job for job in state.jobs.values() if job.device == device]
    for job in here:
        if job.aside:
            return _beside(state, job, [other for other in here if other is not job], device)
    for job in here:
        if job.ending or state.interrupted:
            return _leave(state, job, device)
    if state.interrupted:
        return state, None
    for job in state.jobs.values():
        if job.phase == "waiting" and job.target == device:
            return _start(state, job, device)
    waiting = [j for j in state.jobs.values() if j.phase == "waiting" and j.target is None]
    wanting = max(waiting, key=lambda job: job.priority, default=None)  # the first of the highest
    ready = [job for job in here if job.phase == "ready"]
    if wanting is not None and any(job.priority > wanting.priority for job in ready):
        wanting = None
    if wanting is not None:
        if not (why := likely(state, wanting, device)):
            return _start(state, wanting, device)
        state = state.put(replace(wanting, reason=why))
    if wanting is not None or state.queue:
        for job in here:
            if job.phase == "at_rung":
                why = f"stands at step {job.rung}, and others wait for memory"
                asked = replace(job, ending="moved", ending_why=why)
                return _leave(state.put(asked), asked, device)
    return _train(state, device, ready)


def _beside(
    state: FleetState, aside: JobState, others: list[JobState], device: int
) -> tuple[FleetState, Command | None]:
    """What a device does where a step of a job stands aside."""
    above = [job for job in others if job.priority > aside.priority]
    if not aside.ending and not state.interrupted:
        for job in above:
            if job.ending:
                return _leave(state, job, device)
        waiting = [job for job in state.jobs.values() if job.phase == "waiting"]
        for job in sorted(waiting, key=lambda job: -job.priority):
            if job.priority > aside.priority and _wants(state, job, device):
                return _start(state, job, device)
        ready = [job for job in above if job.phase == "ready"]
        level = max((job.priority for job in ready), default=0)
        first = [job for job in ready if job.priority == level]
        fitting = [job for job in first if _could_train_beside(state, aside, job)]
        if fitting:
            return _train_of(state, device, fitting, level)
        return _doing(
            state.put(replace(aside, phase="running", aside=False, reason="", waits_for=())),
            Turn(aside.name, device, 0, share=False),
        )
    return _leave(state, aside, device)


def _could_train_beside(state: FleetState, aside: JobState, job: JobState) -> bool:
    """Whether a job would train itself, in the arena of one that stands aside."""
    return giver(state, job).name == job.name and lets_in(aside, job)


def _leave(state: FleetState, job: JobState, device: int) -> tuple[FleetState, Command]:
    why = "moved" if job.ending == "moved" else "stopped"
    why = "interrupted" if state.interrupted else why
    reason = job.ending_why or state.interrupted
    leaving = replace(job, phase="leaving", reason=reason, aside=False)
    queue = tuple(name for name in state.queue if name != job.name)
    return _doing(replace(state.put(leaving), queue=queue), Leave(job.name, device, why))


def _start(state: FleetState, job: JobState, device: int) -> tuple[FleetState, Command]:
    started = replace(job, phase="starting", device=device, reason="builds and plans")
    return _doing(state.put(started), Start(job.name, device))


def _cut_short(state: FleetState) -> list[Command]:
    """The turns that end early for jobs of higher priority."""
    found: list[Command] = []
    for device, command in enumerate(state.busy):
        if isinstance(command, Turn) and command.steps:
            running = state.jobs[command.job]
            least = weight(state, running)
            above = [job for job in state.jobs.values() if job.priority > least]
            if wanting := [job for job in above if _wants(state, job, device)]:
                at_once = _stands_aside(state, running, command, wanting)
                found.append(Yield(command.job, device, at_once))
    return found


def _stands_aside(
    state: FleetState, running: JobState, turn: Turn, wanting: list[JobState]
) -> bool:
    """Whether a turn for which others of higher priority wait should end in the middle of a
    step."""
    if turn.share or any(job.aside and job.device == turn.device for job in state.jobs.values()):
        return False
    if not can_stand_aside(state, running):
        return False
    assert running.memory is not None
    could = any(
        job.phase == "waiting" or _could_train_beside(state, running, job) for job in wanting
    )
    return could and worth_standing_aside(running.step_seconds, running.memory.turn_bytes)


def _wants(state: FleetState, job: JobState, device: int) -> bool:
    """Whether a job would have this device if it were free."""
    if job.phase == "ready":
        comes = giver(state, job).phase == "ready"  # else its turn is the running one's
        return job.device == device and not job.ending and comes
    comes = job.phase == "waiting" and job.target in (None, device)
    return comes and not state.interrupted and not likely(state, job, device)


def _train(
    state: FleetState, device: int, ready: list[JobState]
) -> tuple[FleetState, Command | None]:
    """A turn for a job of this device, or a job elsewhere is asked to come here: of the highest
    priority for which there is one of the two."""
    levels = sorted({job.priority for job in state.jobs.values() if not job.ended}, reverse=True)
    for level in levels:
        mine = [job for job in ready if job.priority == level]
        state, command = _train_of(state, device, mine, level)
        if command is not None:
            return state, command
    return state, None


def _train_of(
    state: FleetState, device: int, ready: list[JobState], level: int
) -> tuple[FleetState, Command | None]:
    """The same for the jobs of one priority."""
    jobs, devices = runnable(state, level), state.settings.devices
    laid = lay(jobs, devices)[device]
    grains = {job.name: turn_seconds(job, state.settings) for job in ready}
    may_end_early = state.settings.rule is not None
    chosen = pick(ready, None if may_end_early else laid, state.last[device], grains)
    coming = None
    if movable := _movable(state, device, level):
        if chosen is None:
            coming = pull(laid, movable)
        else:
            waiting = {name for name in movable if state.jobs[name].phase == "ready"}
            coming = urgent(chosen.name, jobs, waiting, devices)
            if ends_soon(laid, grains[chosen.name]):
                coming = coming or pull(laid, waiting)
            if may_end_early:
                coming = coming or even(device, jobs, waiting, devices)
    if coming is not None:
        why = f"moves to device {device}, which has less to do"
        asked = replace(state.jobs[coming], ending="moved", ending_why=why, target=device)
        state = state.put(asked)
    if not ready:
        return state, None
    lender = chosen or max(ready, key=lambda job: job.left * job.step_seconds)
    chosen = giver(state, lender)
    lone = all(job.ended or job.name == chosen.name for job in state.jobs.values())
    steps, share = turn_steps(chosen, ready, state.settings, lone)
    mine = (lender.name, chosen.name)
    waited = [replace(job, waited=job.waited + 1) for job in ready if job.name not in mine]
    running = replace(chosen, phase="running", waited=0, reason="", tail_left=0.0, waits_for=())
    last = tuple(chosen.name if d == device else name for d, name in enumerate(state.last))
    state = replace(state.put(running, *waited), last=last)
    return _doing(state, Turn(chosen.name, device, steps, share, chosen.waits_for))


def _movable(state: FleetState, device: int, level: int) -> set[str]:
    """The jobs of a priority that are elsewhere and could move here; none while one is on its way
    already."""
    if any(job.target == device for job in state.jobs.values()):
        return set()
    return {
        job.name
        for job in state.jobs.values()
        if job.priority == level
        if job.phase in ("ready", "running") and not job.ending and job.device != device
        if not job.aside
        if not lacks_room(state, job, device)
    }


def runnable(state: FleetState, level: int) -> list[Runnable]:
    """The jobs of a priority that train or will soon, with what is left of them."""
    waited_for = any(job.phase == "at_rung" for job in state.jobs.values())
    default = state.settings.move_seconds
    return [
        Runnable(
            job.name,
            place,
            remaining(job, state.settings, waited_for),
            turn_seconds(job, state.settings),
            job.start_seconds + state.leave_seconds if job.start_seconds else default,
        )
        for job in state.jobs.values()
        if job.priority == level
        if job.phase in ("ready", "running", "starting", "leaving", "waiting")
        if job.ending in ("", "moved")
        if (place := job.target if job.target is not None else job.device) is not None
    ]


def _doing(state: FleetState, command: Command) -> tuple[FleetState, Command]:
    busy = tuple(command if d == command.device else c for d, c in enumerate(state.busy))
    return replace(state, busy=busy), command
