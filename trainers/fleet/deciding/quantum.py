"""The length of a turn, and whether the next job begins at its host tail.

    steps   |body|tail|body|tail|        alone
    shared  a |body|....tail....|body|   a's tail is hidden under b's body; each change costs a swap
            b      |body|...tail...|

A turn has whole steps. It is at least 50 swaps long, so that swaps cost at most 2 %, and it ends
at the next rung. If hiding host tails saves more than swaps cost, it is as long as the longest tail
that it hides.
"""

import math
from collections.abc import Sequence

from trainers.fleet.deciding.events import StepTimes
from trainers.fleet.deciding.fleet_state import FleetSettings, JobState

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
"""Shorter steps never stand aside."""


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
