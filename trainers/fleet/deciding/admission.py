"""Who has room: no job takes its memory before all that could be taken at once fits.

    host     |a ........|b .....|c ..|passing|passing|arenas of CPUs|    <= host_bytes
    device 0 |arena ................|plain d |plain e|      <= device_bytes

Jobs are admitted in the order in which they were planned. If the first one does not fit, a later
one may pass, but only if the first and all who passed it fit together into an empty machine. So
the first one waits for those who were there before it, and never for one that passed.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from offload.sizes import say_size
from trainers.fleet.deciding.events import JobMemory
from trainers.fleet.deciding.fleet_state import FleetSettings, FleetState, JobState


@dataclass(frozen=True, slots=True)
class HeldMemory:
    """What a job has taken, or would take."""

    job: str
    device: int
    memory: JobMemory


def host_bytes(held: Collection[HeldMemory], devices: int) -> int:
    """The most that jobs take of the host's memory at once. Each device copies for one job, and has
    one arena, as large as the largest that a job needs."""
    passing = sorted((h.memory.passing_bytes for h in held), reverse=True)
    arenas = sorted((h.memory.arena_bytes for h in held), reverse=True)
    return sum(h.memory.host_bytes for h in held) + sum(passing[:devices]) + sum(arenas[:devices])


def device_bytes(held: Collection[HeldMemory], device: int, settings: FleetSettings) -> int:
    """The most that a device holds: its arena, and what plain jobs keep there."""
    return settings.arena_bytes + sum(h.memory.device_bytes for h in held if h.device == device)


def lacks(new: HeldMemory, held: Collection[HeldMemory], settings: FleetSettings) -> str:
    """What is missing for a job beside those who hold memory, with the numbers; "" if it fits."""
    both = [*held, new]
    host, own = settings.host_bytes, settings.device_bytes
    if host and host_bytes(both, settings.devices) > host:
        taken = host_bytes(held, settings.devices)
        need = host_bytes(both, settings.devices) - taken
        return _said("memory", need, taken, host, [h.job for h in held])
    here = [h for h in held if h.device == new.device and h.memory.device_bytes]
    if own and new.memory.device_bytes and device_bytes(both, new.device, settings) > own:
        taken = device_bytes(here, new.device, settings)
        need = new.memory.device_bytes
        names = [*(["the arena"] if settings.arena_bytes else []), *(h.job for h in here)]
        return _said(f"memory of device {new.device}", need, taken, own, names)
    return ""


def never_fits(memory: JobMemory, settings: FleetSettings) -> str:
    """Why a job would not fit even alone, with the numbers and what to do; "" if it would."""
    alone = [HeldMemory("", 0, memory)]
    need = host_bytes(alone, settings.devices)
    if settings.host_bytes and need > settings.host_bytes:
        return (
            f"it needs {say_size(need)} of the host's memory, and all jobs together may take"
            f" {say_size(settings.host_bytes)}: raise host_budget, or make the job smaller"
        )
    own = device_bytes(alone, 0, settings)
    if settings.device_bytes and memory.device_bytes and own > settings.device_bytes:
        return (
            f"it keeps {say_size(memory.device_bytes)} on its device beside an arena of"
            f" {say_size(settings.arena_bytes)}, and the device has"
            f" {say_size(settings.device_bytes)}: lower budget, or offload this job"
        )
    return ""


def holding(state: FleetState) -> list[HeldMemory]:
    """All who were admitted. A job that moves keeps its room, at the device to which it goes. What
    a step has in the arena while it stands aside waits on the host."""
    held: list[HeldMemory] = []
    for job in state.jobs.values():
        if job.admitted and job.memory is not None:
            held.append(HeldMemory(job.name, _place(job), job.memory))
            if job.aside:
                held.append(HeldMemory(job.name, _place(job), JobMemory(job.memory.turn_bytes)))
    return held


def lets_in(running: JobState, job: JobState) -> bool:
    """Whether a job could have its turn in the arena of one that stands aside."""
    assert job.memory is not None and running.memory is not None
    return job.memory.turn_bytes <= running.memory.turn_bytes


def can_stand_aside(state: FleetState, job: JobState) -> bool:
    """Whether there is room on the host for what a running job has in the arena."""
    if job.memory is None or not job.memory.turn_bytes or job.device is None:
        return False
    copy = HeldMemory(job.name, job.device, JobMemory(job.memory.turn_bytes))
    return not lacks(copy, holding(state), state.settings)


def admitted(state: FleetState) -> FleetState:
    """The state in which whoever of the lobby has room is ready."""
    passers = [name for name in state.passers if state.jobs[name].admitted]
    for name in state.queue:
        job = state.jobs[name]
        assert job.memory is not None
        new = HeldMemory(name, _place(job), job.memory)
        missing = lacks(new, holding(state), state.settings)
        first = state.queue[0]
        if name == first and not missing:
            passers = []
        elif not missing and (behind := _behind(state, new, first, passers)):
            missing = behind
        if missing:
            state = state.put(replace(job, reason=f"waits for {missing}"))
            continue
        if name != first:
            passers.append(name)
        queue = tuple(other for other in state.queue if other != name)
        phase = "ready" if job.rung is None else "at_rung"
        entered = replace(job, phase=phase, reason="", admitted=True, waited=0)
        state = replace(state.put(entered), queue=queue)
    return replace(state, passers=tuple(passers))


def _behind(state: FleetState, new: HeldMemory, first: str, passers: Collection[str]) -> str:
    """Why a job that would fit must not pass the first one; "" if it may."""
    head = state.jobs[first]
    assert head.memory is not None
    before = [h for h in holding(state) if h.job in passers]
    if lacks(new, [*before, HeldMemory(first, _place(head), head.memory)], state.settings):
        return f"{first}, which came before it and needs memory, too"
    return ""


def likely(state: FleetState, job: JobState, device: int) -> str:
    """Why a job should not be started yet, as far as anybody can know; "" if it may be.

    Nobody knows what a job takes before it is planned. So far it counts as the largest one."""
    if state.queue:
        return f"waits: {state.queue[0]} is planned and waits for memory"
    held = holding(state)
    starting = [j for j in state.jobs.values() if j.phase == "starting" and not j.admitted]
    if not held and not starting:
        return ""
    known = [j.memory for j in state.jobs.values() if j.memory is not None]
    largest = max(known, key=lambda m: m.host_bytes, default=JobMemory(0))
    held += [HeldMemory(j.name, j.device or 0, j.memory or largest) for j in starting]
    missing = lacks(HeldMemory(job.name, device, job.memory or largest), held, state.settings)
    if not missing:
        return ""
    guess = "" if job.memory else " (if it takes as much as the largest job so far)"
    return f"waits for {missing}{guess}"


def lacks_room(state: FleetState, job: JobState, device: int) -> str:
    """What is missing on another device for a job that would move there; "" if it fits."""
    assert job.memory is not None
    others = [h for h in holding(state) if h.job != job.name]
    return lacks(HeldMemory(job.name, device, job.memory), others, state.settings)


def _place(job: JobState) -> int:
    if job.target is not None:
        return job.target
    return job.device if job.device is not None else 0


def _said(what: str, need: int, taken: int, size: int, names: Collection[str]) -> str:
    left = f"{say_size(max(0, size - taken))} of {say_size(size)} left"
    if not names:
        return f"{what}: {say_size(need)} needed, {left}"
    verb = "holds" if len(names) == 1 else "hold"
    return f"{what}: {say_size(need)} needed, {left}, {_and(names)} {verb} {say_size(taken)}"


def _and(names: Collection[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
