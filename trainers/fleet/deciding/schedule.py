"""Which job has a device next, and which one moves to it: longest remaining time, at few moves.

No schedule ends before T = max(longest job, sum / devices). McNaughton's wrap-around rule reaches
T: it puts all jobs on a tape that is cut every T seconds, one piece a device. A job that is cut
runs its first part on one device, and the rest at the end of the next device.

    device 0  |bbbb|aaaaaaaaaaaa|        a, b live on device 0, c on 1, d on 2: T = 4/3
    device 1  |cccccccc|bbbbbbbb|        b goes to device 1 when c has left, c to 2 when d is over
    device 2  |dddddddddddd|cccc|

A device with too much work comes before those that take the surplus, so most jobs stay where they
are. The tape is made again at every decision, from the newest measurements. A job moves only when
its new device has nothing else to do, or when the job has no time to spare, and only if what moves
is longer than a turn and two moves. Of the jobs of a device the longest is first: each has T minus
its length to spare.

McNaughton, "Scheduling with Deadlines and Loss Functions" (1959). Hydra, section 2.4, has the
greedy rule; docs/decisions/0029-jobs-move-by-the-wrap-around-rule.md says why it is not used.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from trainers.fleet.deciding.events import StepTimes
from trainers.fleet.deciding.fleet_state import FleetSettings, FleetState, JobState

PATIENCE = 100
"""A job that has waited for this many turns of others is next. So it costs a more urgent job at
most 1 %."""
EVEN = 0.05
"""If jobs may end early, none stays further behind than this share of the longest time."""
WORTH = 10
"""A move for that reason must save this many times its cost."""
URGENT = 12
"""A job with no time to spare moves at once, if that saves this many times its cost. With a smaller
number, random fleets whose moves take 2 % of a job are 1 % slower; without such moves, fleets whose
moves are free are 7 % slower."""


@dataclass(frozen=True, slots=True)
class Runnable:
    """A job that can train, for the schedule."""

    job: str
    device: int
    """Its device, or the one to which it moves."""
    seconds: float
    grain: float = 0.0
    """The seconds of its turn, the shortest share of a device."""
    move: float = 0.0


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a job that a device does."""

    job: str
    seconds: float
    whole: bool
    moves: bool
    """Whether the job is on another device now."""


def assign_shares(jobs: Sequence[Runnable], devices: int) -> tuple[tuple[Share, ...], ...]:
    """Return the shares of each device, so that all devices end at about the same time."""
    shares: list[list[Share]] = [[] for _ in range(devices)]
    if not jobs:
        return tuple(map(tuple, shares))
    end = max(max(job.seconds for job in jobs), sum(job.seconds for job in jobs) / devices)
    room = [end] * devices
    tape: list[tuple[Runnable, float]] = []

    def fill(device: int) -> None:
        while tape:
            job, seconds = tape[0]
            part = _part_worth_cutting(job, seconds, room[device])
            if part <= 0 and seconds > 0:
                break
            _add_share(shares[device], job, part, device)
            room[device] -= part
            if part < seconds:
                tape[0] = (job, seconds - part)
                break
            del tape[0]

    for device in _order(jobs, devices, end):
        here = [job for job in jobs if job.device == device]
        tape += [(job, job.seconds) for job in sorted(here, key=lambda j: (-j.seconds, j.job))]
        fill(device)
    for device in sorted(range(devices), key=lambda d: -room[d]):
        fill(device)  # the surplus of the last devices goes to those with room
    for job, seconds in tape:  # too short to be cut: it stays where it is
        _add_share(shares[job.device], job, seconds, job.device)
    return tuple(map(tuple, shares))


def _add_share(shares: list[Share], job: Runnable, seconds: float, device: int) -> None:
    """Let a device do this many more seconds of a job."""
    seconds += sum(share.seconds for share in shares if share.job == job.job)
    shares[:] = [share for share in shares if share.job != job.job]
    shares.append(Share(job.job, seconds, seconds >= job.seconds - 1e-9, job.device != device))


def _part_worth_cutting(job: Runnable, seconds: float, room: float) -> float:
    """Return how many seconds of the job go into the room: all, none, or a part."""
    if seconds - room <= job.grain + 2 * job.move:
        return seconds
    return room if room > job.grain else 0.0


def _order(jobs: Sequence[Runnable], devices: int, end: float) -> list[int]:
    """Return the devices with too much work, each followed by those that take the surplus."""
    over = [-end] * devices
    for job in jobs:
        over[job.device] += job.seconds
    left = list(range(devices))
    order: list[int] = []
    ahead = 0.0
    while left:
        takers = [d for d in left if over[d] < 0]
        enough = [d for d in takers if over[d] + ahead <= 0]
        if ahead <= 0 or not takers:
            chosen = max(left, key=over.__getitem__)
        elif enough:
            chosen = max(enough, key=over.__getitem__)  # the smallest room that is large enough
        else:
            chosen = min(takers, key=over.__getitem__)  # the largest one
        left.remove(chosen)
        order.append(chosen)
        ahead = max(0.0, ahead + over[chosen])
    return order


def pick_job(
    ready: Sequence[JobState],
    shares: Sequence[Share] | None,
    last: str | None,
    grains: Mapping[str, float],
) -> JobState | None:
    """Return the job that gets the next turn of a device, of those that are ready there; None if
    none should. Without `shares`, it is the longest one. `grains`: the seconds of a turn by job. A
    job whose step time is unknown is first, for one step: no schedule counts it before that."""
    unknown = [job for job in ready if job.step_seconds <= 0]
    if unknown:
        return unknown[0]
    patient = [job for job in ready if job.turns.waited >= PATIENCE]
    if patient:
        return max(patient, key=lambda job: job.turns.waited)
    mine = {s.job for s in shares or () if not s.moves and s.seconds > 0}
    staying = [job for job in ready if shares is None or job.name in mine]

    def rank(job: JobState) -> tuple[bool, float]:
        """First a job whose host tail is over, then the longest one, which has the least time to
        spare. The last one has a turn's advantage, because a change costs a swap."""
        longer = job.left * job.step_seconds + (grains[job.name] if job.name == last else 0.0)
        return job.turns.tail_left <= 0, longer

    return max(staying, key=rank, default=None)


def ends_soon(shares: Sequence[Share], grain: float) -> bool:
    """Return whether the jobs of a device end within two turns. A job that moves there has to end a
    turn and to leave first, so it is asked before the device is idle."""
    return sum(share.seconds for share in shares if not share.moves) <= 2 * grain


def job_to_fetch(shares: Sequence[Share], movable: Collection[str]) -> str | None:
    """Return the job that a device without work fetches; None if none is worth it."""
    coming = [s for s in shares if s.moves and s.job in movable]
    return max(coming, key=lambda s: s.seconds).job if coming else None


def job_to_even_out(
    device: int, jobs: Sequence[Runnable], ready: Collection[str], devices: int
) -> str | None:
    """Return the job that is far behind those of a device and should move there; None if there is
    none. This is for jobs that may end early: if those that are ahead end, the others would be too
    few for all devices. So all keep about the same time to go."""
    load = [0.0] * devices
    for job in jobs:
        load[job.device] += job.seconds
    end = max(max(job.seconds for job in jobs), sum(load) / devices)
    ahead = max((job.seconds for job in jobs if job.device == device), default=0.0)
    behind = [
        job
        for job in jobs
        if job.job in ready and job.device != device
        if job.seconds - ahead > max(EVEN * end, WORTH * job.move, 2 * job.grain)
        if load[device] + job.seconds <= load[job.device]
    ]
    return max(behind, key=lambda job: job.seconds).job if behind else None


def job_to_hurry(
    chosen: str, jobs: Sequence[Runnable], ready: Collection[str], devices: int
) -> str | None:
    """Return a job elsewhere that waits and has no time to spare, if `chosen` has some."""
    end = max(max(job.seconds for job in jobs), sum(job.seconds for job in jobs) / devices)
    [mine] = [job for job in jobs if job.job == chosen]
    least = 2 * mine.grain + URGENT * mine.move
    if end - mine.seconds <= least or mine.seconds <= least:
        return None  # it has no time to spare either, or this device will soon ask for more
    late = [
        job
        for job in jobs
        if job.job in ready and end - job.seconds <= job.grain + job.move
        if job.seconds > job.grain + URGENT * job.move
    ]
    return max(late, key=lambda job: job.seconds).job if late else None


def seconds_left(job: JobState, settings: FleetSettings, to_rung: bool) -> float:
    """Return the seconds that are left of a job; `to_rung`: those to its next rung."""
    steps = job.left
    if to_rung and settings.rule is not None:
        rung = settings.rule.next_look(job.step)
        steps = steps if rung is None else min(steps, rung - job.step)
    return steps * job.step_seconds


def job_to_run_instead(state: FleetState, job: JobState) -> JobState:
    """Return the job that gets the turn of this one: itself, or the one for which it waits, if that
    one trains on the same device."""
    while True:
        others = [state.jobs[name] for name in job.turns.waits_for if name in state.jobs]
        training = [other for other in others if other.phase in ("ready", "running")]
        here = [o for o in training if o.device == job.device and not o.exit.kind]
        if not here:
            return job
        job = here[0]


def effective_priority(state: FleetState, job: JobState) -> int:
    """Return the highest priority of this job and of those whose turn it has."""
    waiting = [o for o in state.jobs.values() if o.turns.waits_for and o.phase == "ready"]
    lent = [o for o in waiting if job_to_run_instead(state, o).name == job.name]
    return max([job.priority, *(other.priority for other in lent)])


def stop_waiting_for(state: FleetState, name: str) -> FleetState:
    """Return the state in which nobody waits for this job, because it has had a turn."""
    waiting = [job for job in state.jobs.values() if name in job.turns.waits_for]
    changed: list[JobState] = []
    for job in waiting:
        names = tuple(other for other in job.turns.waits_for if other != name)
        changed.append(replace(job, turns=replace(job.turns, waits_for=names)))
    return state.with_jobs(*changed)


SWAPS = 50
"""A turn is at least this many times as long as a swap."""
HAND_OVER = 1e-3
"""The seconds of Python in a change to another job."""
LAST_JOB = 20
"""The turn of the last job is this many times longer. A job that is added, stop() and Ctrl-C wait
for its end."""
COPY_RATE = 4e9
"""A low estimate of the bytes a second at which a step that stands aside is copied."""
SHORT_STEP = 0.05


def turn_seconds(job: JobState, settings: FleetSettings) -> float:
    """Return the least seconds of a turn."""
    if settings.quantum is not None:
        return settings.quantum * job.step_seconds
    return max(settings.quantum_seconds, SWAPS * job.plan.times.swap_seconds)


def worth_standing_aside(step_seconds: float, nbytes: int) -> bool:
    """Return whether a step with `nbytes` in the arena should stand aside for another job. Else the
    other job waits for the rest of the step, half of one on average."""
    return step_seconds / 2 > max(SHORT_STEP / 2, 2 * nbytes / COPY_RATE)


def can_hide_tails(jobs: Sequence[StepTimes]) -> bool:
    """Return whether changing after every step hides more seconds of tails than swaps cost."""
    if len(jobs) < 2:
        return False
    bodies = [max(0.0, job.step_seconds - job.tail_seconds) for job in jobs]
    total = sum(bodies)
    hidden = sum(
        min(job.tail_seconds, total - body) for job, body in zip(jobs, bodies, strict=True)
    )
    return hidden > sum(job.swap_seconds + HAND_OVER for job in jobs)


def turn_steps(
    job: JobState, ready: Sequence[JobState], settings: FleetSettings, is_last: bool
) -> tuple[int, bool]:
    """Return the steps of a turn of `job`, one of the `ready` ones of its device, and whether it
    passes the device on at its tail. `is_last`: all other jobs have ended."""
    tail_seconds = job.plan.times.tail_seconds
    share = can_hide_tails([other.plan.times for other in ready])
    if settings.quantum is not None:
        steps = settings.quantum
    elif share:
        others = max(other.plan.times.tail_seconds for other in ready if other is not job)
        steps = 1 if tail_seconds > 0 else _steps(job, others)
    else:
        steps = _steps(job, turn_seconds(job, settings) * (LAST_JOB if is_last else 1))
    rung = settings.rule.next_look(job.step) if settings.rule is not None else None
    if rung is not None:
        steps = min(steps, rung - job.step)
    return max(1, min(steps, job.left)), share and tail_seconds > 0


def _steps(job: JobState, seconds: float) -> int:
    """Return the number of steps in these seconds; 1 if the time of a step is unknown."""
    return math.ceil(seconds / job.step_seconds) if job.step_seconds > 0 else 1
