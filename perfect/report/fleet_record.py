"""Reads the folder of a grid: what came of its jobs, and in which state each was, and when.

    FOLDER/grid.json      --checked--> FleetRecord.jobs, best first
    FOLDER/timeline.jsonl -----------> JobRecord.spans
    FOLDER/jobs/NAME/run.json, metrics.csv --> JobRecord.run

Seconds are those in which the program ran: the time between a kill and the next start is left out.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final, get_type_hints

from perfect.config.grid_schema import FleetConfig
from perfect.config.yaml_reader import shown
from perfect.errors import RunError
from perfect.report.results import Run, read_record, read_run
from trainers.plain_values import typed
from trainers.record_file import parse_object, whole_lines

STATES = ("finished", "stopped", "failed")
"""A job in another state goes on when the same command is given again."""
LATEST = 1e12
"""The largest number of seconds that a clock can show."""


@final
@dataclass(frozen=True, slots=True)
class JobSpan:
    """A job was in a phase, from second `begin` to second `end`."""

    phase: str
    device: int | None
    begin: float
    end: float


@final
@dataclass(frozen=True, slots=True)
class JobRecord:
    """What came of a job."""

    name: str
    settings: dict[str, Any]
    state: str
    step: int
    metric: float | None
    seconds: float
    why: str
    folder: str
    run: Run | None
    """None if it was never built."""
    spans: tuple[JobSpan, ...]


@final
@dataclass(frozen=True, slots=True)
class FleetRecord:
    """What came of a grid."""

    folder: Path
    status: str
    metric: str
    mode: str
    axes: tuple[str, ...]
    fleet: dict[str, Any]
    """The section `fleet` of the YAML."""
    jobs: tuple[JobRecord, ...]
    """Best first."""
    restarts: tuple[float, ...]
    """The seconds at which the program began again."""

    @property
    def seconds(self) -> float:
        return max((span.end for job in self.jobs for span in job.spans), default=0.0)

    @property
    def devices(self) -> tuple[int, ...]:
        used = {span.device for job in self.jobs for span in job.spans}
        return tuple(sorted(device for device in used if device is not None))

    @property
    def best(self) -> JobRecord | None:
        """The best finished job."""
        first = self.jobs[0] if self.jobs else None
        good = first is not None and first.state == "finished" and first.metric is not None
        return first if good else None


def read_fleet(folder: Path) -> FleetRecord:
    """Read the folder of a grid. Raise RunError if there is none in it."""
    path = folder / "grid.json"
    try:
        data = read_record(path)
        fields = _fields_of(FleetRecord, data, "it", "folder", "jobs", "restarts")
        FleetConfig.model_validate(fields["fleet"])
        spans, restarts = read_timeline(folder / "timeline.jsonl")
        rows = typed({"jobs": tuple[dict, ...]}, data, "it")["jobs"]
        jobs = tuple(_job(folder, row, spans) for row in rows)
        return FleetRecord(folder=folder, jobs=jobs, restarts=restarts, **fields)
    except OSError as error:
        raise RunError(
            f"{path} cannot be read ({error.strerror}); give the folder of a grid"
        ) from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, nested too deep
        why = shown(str(error))
        raise RunError(f"{path} is damaged ({why}); run the same command again") from error


def _fields_of(kind: type, data: object, where: str, *others: str) -> dict[str, Any]:
    """Return the fields of a record that a file holds: all but `others`."""
    kinds = {name: part for name, part in get_type_hints(kind).items() if name not in others}
    return {name: part for name, part in typed(kinds, data, where).items() if name in kinds}


def _job(folder: Path, data: object, spans: Mapping[str, Sequence[JobSpan]]) -> JobRecord:
    row = _fields_of(JobRecord, data, "a job", "run", "spans")
    try:
        run = read_run(folder / row["folder"])
    except RunError:
        run = None
    return JobRecord(**row, run=run, spans=tuple(spans.get(row["name"], ())))


def read_timeline(path: Path) -> tuple[dict[str, list[JobSpan]], tuple[float, ...]]:
    """Return the spans of each job, and the seconds at which the program began again."""
    spans: dict[str, list[JobSpan]] = defaultdict(list)
    running: dict[str, tuple[str, int | None, float]] = {}
    restarts: list[float] = []
    last: float | None = None
    lost = 0.0

    def close(job: str, end: float) -> None:
        phase, device, begin = running.pop(job)
        if end > begin:
            spans[job].append(JobSpan(phase, device, begin, end))

    for row in _rows(path):
        at = row["at"]
        if row.get("program") == "begins":
            lost = at if last is None else lost + at - last
            now = at - lost
            for job in list(running):
                close(job, now)  # a kill left them open
            if last is not None:
                restarts.append(now)
        elif row.get("program") == "ends":
            for job in list(running):
                close(job, at - lost)
        else:
            job = row["job"]
            if job in running:
                close(job, at - lost)
            if row["phase"] not in STATES:
                running[job] = (row["phase"], row["device"], at - lost)
        last = at
    for job in list(running):
        close(job, (last or 0.0) - lost)
    return dict(spans), tuple(restarts)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines that say what a program or a job did. A kill may have cut one short."""
    of_job = {"at": float, "job": str, "phase": str, "device": int | None}
    for line in whole_lines(path):
        with suppress(ValueError):
            row = parse_object(line)
            typed({"at": float, "program": str} if "program" in row else of_job, row, "it")
            if abs(row["at"]) < LATEST and row.get("program", "begins") in ("begins", "ends"):
                yield row
