"""Jobs that wait for the turns of others, because they read the same input.

    a  |---- turn ----| waits for b ............. |-- turn
    b  .............. |---- turn: takes the batches that a has read ----|

A job that reads together with others may be ahead of them by the window of their stream. Then its
turn ends early, and it names the jobs that have to read first. If it would be chosen next, its turn
goes to the first of them, whatever its priority.

A job that has had a turn is not waited for any more, so names lead only to jobs whose last turn is
older, and there is no circle. Nor is a job that cannot read: it is at a rung, waits for memory,
leaves, or has ended.
"""

from dataclasses import replace

from trainers.fleet.deciding.fleet_state import FleetState, JobState


def awaited_jobs(state: FleetState, job: JobState) -> tuple[str, ...]:
    """Return the jobs for which this one waits, if they train on the same device."""
    others = [state.jobs[name] for name in job.turns.waits_for if name in state.jobs]
    return tuple(
        other.name
        for other in others
        if other.phase in ("ready", "running") and other.device == job.device
        if not other.exit.kind
    )


def job_to_run_instead(state: FleetState, job: JobState) -> JobState:
    """Return the job that gets the turn of this one: itself, or the one for which it waits."""
    while names := awaited_jobs(state, job):
        job = state.jobs[names[0]]
    return job


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
