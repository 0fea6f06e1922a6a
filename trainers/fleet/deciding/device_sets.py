"""Which jobs train on several devices at once, and on which. A job's devices follow one another.

    device   0       1       2       3
             [ a needs two ] [b]     [c]      a waits until two are empty: `reserved_devices`
             [ a           ] [ b           ]  c has ended, and b could use two: `job_to_widen`

A job that has several devices shares them with nobody. For one that needs several, the devices with
the least work are emptied: their jobs leave, and go on elsewhere or later. A job that may use more
than it has gets empty ones for which no job waits, the longest first, because it ends last.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace

from trainers.fleet.deciding.admission import why_not_start
from trainers.fleet.deciding.fleet_state import FleetState, JobExit, JobState

LEAST_GAIN = 0.05
"""Each further device must save at least this share of a job's time."""
WIDENING_WORTH = 2
"""The move must save this many times its cost."""


def held_devices(job: JobState) -> Iterator[range]:
    """Yield the devices on which a job is, and those to which it moves."""
    if job.device is not None:
        yield range(job.device, job.device + job.width)
    if job.exit.target is not None:
        yield range(job.exit.target, job.exit.target + job.exit.width)


def wide_jobs(state: FleetState) -> dict[int, JobState]:
    """Return, by device, the job that has it together with others."""
    return {
        device: job
        for job in state.jobs.values()
        for devices in held_devices(job)
        if len(devices) > 1
        for device in devices
    }


def reserved_devices(state: FleetState) -> dict[int, JobState]:
    """Return, by device, the waiting job for which it is emptied, because that needs several."""
    reserved: dict[int, JobState] = {}
    homeless = [j for j in state.jobs.values() if j.phase == "waiting" and j.exit.target is None]
    free, wide = {*range(state.settings.devices)}, {*wide_jobs(state)}
    for job in sorted(homeless, key=lambda job: -job.priority):
        if job.least > 1:
            urgent = any(o.least == 1 and o.priority > job.priority for o in homeless)
            places = [
                devices
                for devices in _ranges(state, job.least)
                if free.issuperset(devices) and len(free - wide - {*devices}) >= urgent
                if all(_gives_way(other, job) for other in _jobs_on(state, devices))
                if not why_not_start(state, job, devices[0], [*_jobs_on(state, devices)])
            ]
            if places:
                place = min(places, key=lambda devices: _work_on(state, devices))
                reserved |= dict.fromkeys(place, job)
                free -= {*place}
    return reserved


def start_width(state: FleetState, job: JobState, device: int) -> int:
    """Return the number of devices that a waiting job gets if it starts on this one; 0: it may not
    start there now."""
    reserved = reserved_devices(state)
    if job.least > 1:
        mine = [number for number, other in reserved.items() if other.name == job.name]
        starts = mine[:1] == [device] and all(is_empty(state, number) for number in mine)
        return job.least if starts else 0
    return int(device not in reserved and device not in wide_jobs(state))


def job_to_make_room_for(state: FleetState, job: JobState, device: int) -> str:
    """Return the name of a waiting job for which this one leaves its device; "" if none. That is a
    job that needs several devices, or one that finds no place because this job has several: more
    than it needs, or at a lower priority."""
    if (coming := reserved_devices(state).get(device)) is not None:
        return coming.name
    if job.width == 1:
        return ""
    for other in state.jobs.values():
        waits = other.phase == "waiting" and other.exit.target is None and other.least == 1
        if waits and _gives_way(job, other) and not _finds_place(state):
            return other.name
    return ""


def _gives_way(job: JobState, waiting: JobState) -> bool:
    """Return whether a job would leave its devices for one that waits. One that stands at a rung
    always would: others may have to reach theirs before it goes on. One that has several leaves
    them to an equal one only if it does not need them all."""
    if job.phase == "at_rung" or job.priority < waiting.priority:
        return True
    return job.priority == waiting.priority and (job.width == 1 or job.width > job.least)


def _finds_place(state: FleetState) -> bool:
    """Return whether there is a device for a job that needs one."""
    reserved, taken = reserved_devices(state), wide_jobs(state)
    return any(
        device not in reserved and device not in taken for device in range(state.settings.devices)
    )


def is_empty(state: FleetState, device: int) -> bool:
    """Return whether no job is on a device or comes to it."""
    return state.busy[device] is None and not [*_jobs_on(state, [device])]


def widen_job(state: FleetState) -> FleetState:
    """Return the state in which a job is asked to move onto more devices, if that is worth it."""
    found = job_to_widen(state)
    if found is None:
        return state
    job, place = found
    why = f"moves onto devices {place[0]} to {place[-1]}, for which no job waits"
    return state.with_jobs(replace(job, exit=JobExit("moved", why, place[0], width=len(place))))


def job_to_widen(state: FleetState) -> tuple[JobState, range] | None:
    """Return the job that should move onto more devices, and those; None if none should."""
    alive = [job for job in state.jobs.values() if not job.ended]
    if not state.settings.migrate or state.interrupted:
        return None
    if any(job.phase not in ("ready", "running") for job in alive):
        return None  # a job that starts, or waits, may want what is empty
    if any(job.exit.kind for job in alive):
        return None
    able = [job for job in alive if _can_widen(job)]
    # Each job that shares its device with another one may move to an empty one.
    crowded = len(alive) - len({job.device for job in alive})
    empty = [number for number in range(state.settings.devices) if is_empty(state, number)]
    widths = _widths_for(able, len(empty) - crowded)
    for job in sorted(able, key=lambda job: -seconds_on(job, job.width)):
        for width in range(widths[job.name], job.width, -1):
            saved = seconds_on(job, job.width) - seconds_on(job, width)
            if saved > WIDENING_WORTH * _move_seconds(state, job):
                for devices in _ranges(state, width):
                    if all(other is job for other in _jobs_on(state, devices)):
                        return job, devices
    return None


def seconds_on(job: JobState, width: int) -> float:
    """Return the seconds that are left of a job on so many devices, as far as they are known."""
    predicted = job.plan.seconds_by_devices
    return job.left * job.step_seconds * predicted[width - 1] / predicted[job.width - 1]


def _can_widen(job: JobState) -> bool:
    knows = len(job.plan.seconds_by_devices) >= job.most and job.step_seconds > 0
    return knows and job.left > 0 and job.most > job.width and not job.turns.is_aside


def _widths_for(jobs: Collection[JobState], spare: int) -> dict[str, int]:
    """Share out devices: always to the job that would end last, as long as it gains by them."""
    widths = {job.name: job.width for job in jobs}
    growing = [*jobs]
    while growing:
        job = max(growing, key=lambda job: seconds_on(job, widths[job.name]))
        had = widths[job.name]
        now = seconds_on(job, had)
        wider = range(had + 1, min(job.most, had + spare) + 1)
        gains = {width: 1 - seconds_on(job, width) / now for width in wider}
        better = next((w for w, gain in gains.items() if gain > LEAST_GAIN * (w - had)), None)
        if better is None:
            growing.remove(job)
            continue
        widths[job.name] = better
        spare -= better - had
    return widths


def _move_seconds(state: FleetState, job: JobState) -> float:
    measured = job.plan.start_seconds + state.leave_seconds
    return measured if job.plan.start_seconds else state.settings.move_seconds


def _ranges(state: FleetState, width: int) -> list[range]:
    return [range(first, first + width) for first in range(state.settings.devices - width + 1)]


def _is_on(job: JobState, device: int) -> bool:
    return any(device in devices for devices in held_devices(job))


def _jobs_on(state: FleetState, devices: Collection[int]) -> Iterator[JobState]:
    for job in state.jobs.values():
        if any(_is_on(job, device) for device in devices):
            yield job


def _work_on(state: FleetState, devices: Collection[int]) -> float:
    """Return the seconds that are left of the jobs on these devices; a start counts as well."""
    jobs = _jobs_on(state, devices)
    return sum(job.left * job.step_seconds + state.settings.move_seconds for job in jobs)
