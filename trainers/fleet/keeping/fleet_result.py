"""The results of a fleet's jobs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainers.fleet.deciding.events import FleetError
from trainers.fleet.deciding.fleet_state import ENDED


@dataclass(frozen=True, slots=True)
class JobResult:
    """The result of one job."""

    name: str
    state: str
    """finished, stopped, failed, or the phase in which the fleet was interrupted."""
    step: int
    metric: float | None
    """The watched metric as it was last logged."""
    seconds: float
    """The device seconds of its turns."""
    why: str
    """Why it was stopped, or its error on one line."""
    details: str
    folder: Path


@dataclass(frozen=True, slots=True)
class FleetResult:
    """The results of all jobs, in the order of adding."""

    jobs: Mapping[str, JobResult]
    history: Mapping[str, Mapping[int, float]]
    """The watched metric of each job, by its step."""
    metric: str | None
    mode: str

    @property
    def ranked(self) -> list[JobResult]:
        """Return the jobs, best first. Those without a number come last."""
        sign = -1.0 if self.mode == "max" else 1.0

        def key(job: JobResult) -> tuple[int, float]:
            if job.metric is None or math.isnan(job.metric):
                return 2, 0.0
            return int(job.state != "finished"), sign * job.metric

        return sorted(self.jobs.values(), key=key)

    @property
    def unfinished(self) -> list[JobResult]:
        """Return the jobs that the same program would resume."""
        return [job for job in self.jobs.values() if job.state not in ENDED]

    @property
    def best(self) -> str:
        """Return the name of the finished job with the best metric, or of one that may go on."""
        if self.metric is None:
            raise FleetError(
                "there is no best job, because the fleet watches no metric: give Fleet(metric=...)"
            )
        for job in self.ranked:
            may_count = job.state not in ("stopped", "failed")
            if may_count and job.metric is not None and not math.isnan(job.metric):
                return job.name
        raise FleetError(f"there is no best job: none has finished with a {self.metric}")

    def table(self) -> str:
        """Return the jobs as text, best first."""
        head = ("job", "state", "step", self.metric or "metric", "seconds", "why")
        rows = [
            (
                job.name,
                job.state,
                str(job.step),
                "" if job.metric is None else f"{job.metric:.6g}",
                f"{job.seconds:.1f}",
                job.why,
            )
            for job in self.ranked
        ]
        widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (head, *rows)
        ]
        return "\n".join(lines)


def describe_unfinished(jobs: Sequence[JobResult], folder: Path) -> str:
    """Return how many of the unfinished jobs have a checkpoint."""
    kept = sum(job.step > 0 for job in jobs)
    text = f"{kept} {'job is' if kept == 1 else 'jobs are'} checkpointed"
    if fresh := len(jobs) - kept:
        text += f", {fresh} {'begins' if fresh == 1 else 'begin'} anew,"
    return f"{text} in {folder}"
