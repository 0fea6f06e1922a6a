"""Admits jobs: no job takes its memory before all that could be taken at once fits.

    host     |a ........|b .....|c ..|passing|passing|arenas of CPUs|    <= host_bytes
    device 0 |arena ................|plain d |plain e|      <= device_bytes

Jobs are admitted in the order in which they were planned. If the first one does not fit, a later
one may pass it, but only if the first and all that passed it fit together into an empty machine. So
the first one never waits for a job that passed it.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from offload.sizes import format_size
from trainers.fleet.deciding.events import JobMemory
from trainers.fleet.deciding.fleet_state import FleetSettings, FleetState, JobState


@dataclass(frozen=True, slots=True)
class HeldMemory:
    """The memory that a job has taken, or would take."""

    job: str
    device: int
    memory: JobMemory


def host_bytes(held: Collection[HeldMemory], devices: int) -> int:
    """Return the most bytes that jobs take of the host at once. Each device copies for one job at a
    time, and has one arena of the largest size that a job needs."""
    passing = sorted((h.memory.passing_bytes for h in held), reverse=True)
    arenas = sorted((h.memory.arena_bytes for h in held), reverse=True)
    return sum(h.memory.host_bytes for h in held) + sum(passing[:devices]) + sum(arenas[:devices])


def device_bytes(held: Collection[HeldMemory], device: int, settings: FleetSettings) -> int:
    """Return the most bytes that a device holds: its arena, and the memory of plain jobs."""
    return settings.arena_bytes + sum(h.memory.device_bytes for h in held if h.device == device)


def missing_memory(new: HeldMemory, held: Collection[HeldMemory], settings: FleetSettings) -> str:
    """Return what a job lacks besides those that hold memory, with the numbers; "" if it fits."""
    both = [*held, new]
    host, device = settings.host_bytes, settings.device_bytes
    if host and host_bytes(both, settings.devices) > host:
        taken = host_bytes(held, settings.devices)
        need = host_bytes(both, settings.devices) - taken
        return _describe_lack("memory", need, taken, host, [h.job for h in held])
    here = [h for h in held if h.device == new.device and h.memory.device_bytes]
    if device and new.memory.device_bytes and device_bytes(both, new.device, settings) > device:
        taken = device_bytes(here, new.device, settings)
        need = new.memory.device_bytes
        names = [*(["the arena"] if settings.arena_bytes else []), *(h.job for h in here)]
        return _describe_lack(f"memory of device {new.device}", need, taken, device, names)
    return ""


def why_it_never_fits(memory: JobMemory, settings: FleetSettings) -> str:
    """Return why a job would not fit even alone, and what to do; "" if it would fit."""
    alone = [HeldMemory("", 0, memory)]
    need = host_bytes(alone, settings.devices)
    if settings.host_bytes and need > settings.host_bytes:
        return (
            f"it needs {format_size(need)} of the host's memory, and all jobs together may take"
            f" {format_size(settings.host_bytes)}: raise host_budget, or make the job smaller"
        )
    held = device_bytes(alone, 0, settings)
    if settings.device_bytes and memory.device_bytes and held > settings.device_bytes:
        return (
            f"it keeps {format_size(memory.device_bytes)} on its device beside an arena of"
            f" {format_size(settings.arena_bytes)}, and the device has"
            f" {format_size(settings.device_bytes)}: lower budget, or offload this job"
        )
    return ""


def held_memory(state: FleetState) -> list[HeldMemory]:
    """Return the memory of all admitted jobs. A job that moves keeps its room, on its new device.
    While a step stands aside, its part of the arena is on the host."""
    held: list[HeldMemory] = []
    for job in state.jobs.values():
        if job.plan.is_admitted and job.plan.memory is not None:
            held.append(HeldMemory(job.name, _place(job), job.plan.memory))
            if job.turns.is_aside:
                copy = JobMemory(job.plan.memory.turn_bytes)
                held.append(HeldMemory(job.name, _place(job), copy))
    return held


def fits_into_arena(job: JobState, aside: JobState) -> bool:
    """Return whether a job could have its turn in the arena of one that stands aside."""
    assert job.plan.memory is not None and aside.plan.memory is not None
    return job.plan.memory.turn_bytes <= aside.plan.memory.turn_bytes


def can_stand_aside(state: FleetState, job: JobState) -> bool:
    """Return whether the host has room for the running job's part of the arena."""
    memory = job.plan.memory
    if memory is None or not memory.turn_bytes or job.device is None:
        return False
    copy = HeldMemory(job.name, job.device, JobMemory(memory.turn_bytes))
    return not missing_memory(copy, held_memory(state), state.settings)


def admit_jobs(state: FleetState) -> FleetState:
    """Return the state in which the jobs of the lobby that have room are ready."""
    passers = [name for name in state.passers if state.jobs[name].plan.is_admitted]
    for name in state.queue:
        job = state.jobs[name]
        assert job.plan.memory is not None
        new = HeldMemory(name, _place(job), job.plan.memory)
        missing = missing_memory(new, held_memory(state), state.settings)
        first = state.queue[0]
        if name == first and not missing:
            passers = []
        elif not missing and (why := _why_not_pass(state, new, first, passers)):
            missing = why
        if missing:
            state = state.with_jobs(replace(job, reason=f"waits for {missing}"))
            continue
        if name != first:
            passers.append(name)
        queue = tuple(other for other in state.queue if other != name)
        phase = "ready" if job.rungs.rung is None else "at_rung"
        job = replace(
            job, phase=phase, reason="", plan=replace(job.plan, is_admitted=True),
            turns=replace(job.turns, waited=0),
        )  # fmt: skip
        state = replace(state.with_jobs(job), queue=queue)
    return replace(state, passers=tuple(passers))


def _why_not_pass(state: FleetState, new: HeldMemory, first: str, passers: Collection[str]) -> str:
    """Return why a job that would fit must not pass the first one; "" if it may."""
    head = state.jobs[first]
    assert head.plan.memory is not None
    before = [h for h in held_memory(state) if h.job in passers]
    if missing_memory(
        new, [*before, HeldMemory(first, _place(head), head.plan.memory)], state.settings
    ):
        return f"{first}, which came before it and needs memory, too"
    return ""


def why_not_start(
    state: FleetState, job: JobState, device: int, leaving: Collection[JobState] = ()
) -> str:
    """Return why a job should not be started yet, guessing what it takes; "" if it may be when the
    `leaving` ones are gone."""
    if state.queue:
        return f"waits: {state.queue[0]} is planned and waits for memory"
    gone = {other.name for other in leaving}
    held = [each for each in held_memory(state) if each.job not in gone]
    unknown = [j for j in state.jobs.values() if j.phase == "starting" and not j.plan.is_admitted]
    starting = [other for other in unknown if other.name not in gone]
    if not held and not starting:
        return ""
    known = [j.plan.memory for j in state.jobs.values() if j.plan.memory is not None]
    largest = max(known, key=lambda m: m.host_bytes, default=JobMemory(0))
    held += [HeldMemory(j.name, j.device or 0, j.plan.memory or largest) for j in starting]
    missing = missing_memory(
        HeldMemory(job.name, device, job.plan.memory or largest), held, state.settings
    )
    if not missing:
        return ""
    guess = "" if job.plan.memory else " (if it takes as much as the largest job so far)"
    return f"waits for {missing}{guess}"


def lacks_room(state: FleetState, job: JobState, device: int) -> str:
    """Return what another device lacks for a job that would move there; "" if it fits."""
    assert job.plan.memory is not None
    others = [h for h in held_memory(state) if h.job != job.name]
    return missing_memory(HeldMemory(job.name, device, job.plan.memory), others, state.settings)


def _place(job: JobState) -> int:
    if job.exit.target is not None:
        return job.exit.target
    return job.device if job.device is not None else 0


def _describe_lack(what: str, need: int, taken: int, size: int, names: Collection[str]) -> str:
    left = f"{format_size(max(0, size - taken))} of {format_size(size)} left"
    if not names:
        return f"{what}: {format_size(need)} needed, {left}"
    verb = "holds" if len(names) == 1 else "hold"
    *most, last = names
    holders = f"{', '.join(most)} and {last}" if most else last
    holders += f" {verb} {format_size(taken)}"
    return f"{what}: {format_size(need)} needed, {left}, {holders}"
