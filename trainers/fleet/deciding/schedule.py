"""Which job has a device next, and which one moves to it: longest remaining time, at few moves.

No schedule ends before T = max(longest job, sum / devices). McNaughton's wrap-around rule reaches
T: it lays all jobs on a tape that is cut every T seconds, one piece a device. A job that is cut
runs its first part here, and its rest at the end of the next device.

    device 0  |bbbb|aaaaaaaaaaaa|        a, b live on device 0, c on 1, d on 2: T = 4/3
    device 1  |cccccccc|bbbbbbbb|        b goes to device 1 when c has left, c to 2 when d is over
    device 2  |dddddddddddd|cccc|

Here a device with too much lies before those that take it, so jobs stay where they live, but for
the overflow. The tape is laid again at every decision, from what was measured since, and a job
moves only when the device that it goes to has nothing else to do, or when it has no time to spare.
Whatever is shorter than a turn and two moves is not worth it. Of the jobs of a device the longest
is first: each has T minus its length to spare, wherever its parts lie.

McNaughton, "Scheduling with Deadlines and Loss Functions" (1959). Hydra, section 2.4, has the
greedy rule; docs/decisions/0029-jobs-move-by-the-wrap-around-rule.md says why it is not used.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from trainers.fleet.deciding.fleet_state import FleetSettings, JobState

PATIENCE = 100
"""A job that has seen so many turns of others is next, whatever else would be better. So each job
costs one that is more urgent at most 1 %."""
EVEN = 0.05
"""Where jobs may end early, none stays further behind than this share of what is left in all."""
WORTH = 10
"""And a move for that reason must bring so many times its seconds: it costs a few % at most."""
URGENT = 12
"""A job that has no time to spare moves at once, if what it saves is so many times its cost. With
fewer, random fleets whose moves take 2 % of a job are 1 % slower; without this, free moves 7 %."""


@dataclass(frozen=True, slots=True)
class Runnable:
    """A job that can train, as the schedule sees it."""

    job: str
    device: int
    """Where it lives, or where it is going."""
    seconds: float
    """What is left of it."""
    grain: float = 0.0
    """The seconds of its turn: nothing shorter can be given to a device."""
    move: float = 0.0
    """What it costs to move it."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a device does of a job."""

    job: str
    seconds: float
    whole: bool
    """Whether it is all that is left of this job."""
    moves: bool
    """Whether the job lives elsewhere."""


def lay(jobs: Sequence[Runnable], devices: int) -> tuple[tuple[Share, ...], ...]:
    """By device what it does until all is done, so that all end at about the same time."""
    shares: list[list[Share]] = [[] for _ in range(devices)]
    if not jobs:
        return tuple(map(tuple, shares))
    end = max(max(job.seconds for job in jobs), sum(job.seconds for job in jobs) / devices)
    room = [end] * devices
    tape: list[tuple[Runnable, float]] = []

    def fill(device: int) -> None:
        while tape:
            job, seconds = tape[0]
            part = _part(job, seconds, room[device])
            if part <= 0 and seconds > 0:
                break
            _give(shares[device], job, part, device)
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
        fill(device)  # what the last devices have too much, where room was left before
    for job, seconds in tape:  # less than is worth a cut: it stays where it is
        _give(shares[job.device], job, seconds, job.device)
    return tuple(map(tuple, shares))


def _give(shares: list[Share], job: Runnable, seconds: float, device: int) -> None:
    """Let a device do so much more of a job."""
    seconds += sum(share.seconds for share in shares if share.job == job.job)
    shares[:] = [share for share in shares if share.job != job.job]
    shares.append(Share(job.job, seconds, seconds >= job.seconds - 1e-9, job.device != device))


def _part(job: Runnable, seconds: float, room: float) -> float:
    """How much of so many seconds goes into the room: all, none, or a part that is worth a cut."""
    if seconds - room <= job.grain + 2 * job.move:
        return seconds
    return room if room > job.grain else 0.0


def _order(jobs: Sequence[Runnable], devices: int, end: float) -> list[int]:
    """Devices with too much, each followed by those that take it."""
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


def pick(
    ready: Sequence[JobState],
    shares: Sequence[Share] | None,
    last: str | None,
    grains: Mapping[str, float],
) -> JobState | None:
    """Whose turn it is on a device, of the jobs that are ready there; None if none should.

    Without `shares`, the longest one. `grains`: the seconds of a turn by job. A job whose steps
    nobody can predict is first, for one step: before that no schedule counts it.
    """
    unknown = [job for job in ready if job.step_seconds <= 0]
    if unknown:
        return unknown[0]
    patient = [job for job in ready if job.waited >= PATIENCE]
    if patient:
        return max(patient, key=lambda job: job.waited)
    mine = {s.job for s in shares or () if not s.moves and s.seconds > 0}
    staying = [job for job in ready if shares is None or job.name in mine]

    def rank(job: JobState) -> tuple[bool, float]:
        """Whose host tail is over, then who is longest, which is who has the least time to spare,
        here or where it goes. Who was last stays for a turn, because a change costs a swap."""
        longer = job.left * job.step_seconds + (grains[job.name] if job.name == last else 0.0)
        return job.tail_left <= 0, longer

    return max(staying, key=rank, default=None)


def ends_soon(shares: Sequence[Share], grain: float) -> bool:
    """Whether a device ends what lives there within two turns. A job that comes has to end a turn
    and to leave first, so it is asked to come before the device has nothing to do."""
    return sum(share.seconds for share in shares if not share.moves) <= 2 * grain


def pull(shares: Sequence[Share], movable: Collection[str]) -> str | None:
    """Which job a device without work fetches from elsewhere; None if none is worth it."""
    coming = [s for s in shares if s.moves and s.job in movable]
    return max(coming, key=lambda s: s.seconds).job if coming else None


def even(device: int, jobs: Sequence[Runnable], ready: Collection[str], devices: int) -> str | None:
    """Which job, far behind those of a device, should come there; None if there is none.

    Only where jobs may end early. If some end that the tape counted on, those that were behind are
    too few for all devices; so all keep about the same time to go.
    """
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


def urgent(
    chosen: str, jobs: Sequence[Runnable], ready: Collection[str], devices: int
) -> str | None:
    """Which job elsewhere has no time to spare and waits, while `chosen` has some; None if none."""
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


def remaining(job: JobState, settings: FleetSettings, to_rung: bool) -> float:
    """The seconds that are left of a job, or if somebody waits for it, those to its next rung."""
    steps = job.left
    if to_rung and settings.rule is not None:
        rung = settings.rule.next_look(job.step)
        steps = steps if rung is None else min(steps, rung - job.step)
    return steps * job.step_seconds
