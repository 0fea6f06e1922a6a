"""Jobs that wait for the turns of others, because they read the same input.

    a  |---- turn ----| waits for b ............. |-- turn
    b  .............. |---- turn: takes what a has read ----|

A job that reads together with others may be ahead of them by the window of their stream. Then its
turn ends early, and it names those that have to take their batches first. Its next turn is theirs:
whoever would be chosen and waits, lends its place to the first of them, whatever its priority.

Who has had a turn is waited for no more, so names lead only to jobs whose last turn is older. There
is no circle, and at the end of every chain is a job that can go on. Who does not come (it stands at
a rung, waits for memory, leaves, has ended) is waited for no more either.
"""

from dataclasses import replace

from trainers.fleet.deciding.fleet_state import FleetState, JobState


def awaited(state: FleetState, job: JobState) -> tuple[str, ...]:
    """Of the jobs for which this one waits, those that come: they live beside it and train."""
    found = [state.jobs[name] for name in job.waits_for if name in state.jobs]
    return tuple(
        other.name
        for other in found
        if other.phase in ("ready", "running") and other.device == job.device and not other.ending
    )


def giver(state: FleetState, job: JobState) -> JobState:
    """Who has the turn that this job would have: itself, or the one for whom it waits."""
    while names := awaited(state, job):
        job = state.jobs[names[0]]
    return job


def weight(state: FleetState, job: JobState) -> int:
    """The priority of a job, or of the highest one for which it has a turn."""
    lent = [other for other in state.jobs.values() if other.waits_for and other.phase == "ready"]
    return max([job.priority, *(o.priority for o in lent if giver(state, o).name == job.name)])


def had_turn(state: FleetState, name: str) -> FleetState:
    """The state in which nobody waits for this job any more."""
    waiting = [job for job in state.jobs.values() if name in job.waits_for]
    return state.put(
        *(replace(o, waits_for=tuple(n for n in o.waits_for if n != name)) for o in waiting)
    )
