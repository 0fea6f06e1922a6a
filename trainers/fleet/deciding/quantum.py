"""How long a turn is, and whether the next job begins at its host tail.

    steps   |body|tail|body|tail|        alone
    shared  a |body|....tail....|body|   a's tail is hidden under b's body; each change costs a swap
            b      |body|...tail...|

A turn has whole steps. It is at least 50 swaps long, so that swaps cost at most 2 %, and it ends
at the next rung. Where host tails are worth more than swaps, it is as long as the longest tail
that it hides.
"""

import math
from collections.abc import Sequence
from typing import Protocol

from trainers.fleet.deciding.fleet_state import FleetSettings, JobState

SWAPS = 50
"""A turn is at least so many times as long as a swap."""
HAND_OVER = 1e-3
"""Seconds that a change to another job takes of Python, whatever else moves."""
LONE = 20
"""The turn of the last job is so many times longer. It is no more, because whoever is added or
stopped, and Ctrl-C, wait for its end."""
COPY_RATE = 4e9
"""Bytes a second that what waits is copied with, on a slow day: out, and back."""
SHORT_STEP = 0.05
"""A step that is shorter is never worth standing aside."""


class StepTimes(Protocol):
    """What a step takes: a plan says it, and so does a job's state."""

    @property
    def step_seconds(self) -> float: ...
    @property
    def tail_seconds(self) -> float: ...
    @property
    def swap_seconds(self) -> float: ...


def turn_seconds(job: JobState, settings: FleetSettings) -> float:
    """What a turn should take at least."""
    if settings.quantum is not None:
        return settings.quantum * job.step_seconds
    return max(settings.quantum_seconds, SWAPS * job.swap_seconds)


def worth_standing_aside(step_seconds: float, nbytes: int) -> bool:
    """Whether another job should come in the middle of a step, which has so much in the arena: it
    has to wait for the rest of the step otherwise, half of one on average."""
    return step_seconds / 2 > max(SHORT_STEP / 2, 2 * nbytes / COPY_RATE)


def hides_tails(ready: Sequence[StepTimes]) -> bool:
    """Whether changing after every step hides more seconds of tails than it costs in swaps."""
    if len(ready) < 2:
        return False
    bodies = [max(0.0, job.step_seconds - job.tail_seconds) for job in ready]
    total = sum(bodies)
    hidden = sum(
        min(job.tail_seconds, total - body) for job, body in zip(ready, bodies, strict=True)
    )
    return hidden > sum(job.swap_seconds + HAND_OVER for job in ready)


def turn_steps(
    job: JobState, ready: Sequence[JobState], settings: FleetSettings, lone: bool
) -> tuple[int, bool]:
    """The steps of a turn of `job`, one of those that are ready on its device; and whether it
    hands the device on at its tail. `lone`: it is the last one of all."""
    share = hides_tails(ready)
    if settings.quantum is not None:
        steps = settings.quantum
    elif share:
        others = max(other.tail_seconds for other in ready if other is not job)
        steps = 1 if job.tail_seconds > 0 else _steps(job, others)
    else:
        steps = _steps(job, turn_seconds(job, settings) * (LONE if lone else 1))
    rung = settings.rule.next_look(job.step) if settings.rule is not None else None
    if rung is not None:
        steps = min(steps, rung - job.step)
    return max(1, min(steps, job.left)), share and job.tail_seconds > 0


def _steps(job: JobState, seconds: float) -> int:
    """So many steps take so long. One, if nobody knows what a step takes."""
    return math.ceil(seconds / job.step_seconds) if job.step_seconds > 0 else 1
