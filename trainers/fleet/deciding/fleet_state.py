"""The state of a fleet: plain values, which `decide` replaces and nobody changes.

waiting -> starting -> (lobby) -> ready <-> running -> finished
   ^                                |         '-> at_rung -> ready, or leaving
   '---- moved, parked -- leaving <-'              leaving -> stopped, failed
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from trainers.fleet.deciding.events import Command, JobMemory, StepTimes
from trainers.fleet.deciding.halving import StopRule

Phase = Literal[
    "waiting", "starting", "lobby", "ready", "running", "at_rung", "leaving",
    "finished", "stopped", "failed",
]  # fmt: skip
ENDED: tuple[Phase, ...] = ("finished", "stopped", "failed")


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """The settings of the whole run."""

    devices: int = 1
    host_bytes: int = 0
    """The bytes of the host that all jobs together may take. 0: no limit is known."""
    device_bytes: int = 0
    """The bytes of each device that its jobs and its arena may take. 0: no limit is known."""
    arena_bytes: int = 0
    quantum: int | None = None
    """The steps of a turn. None: from `quantum_seconds`."""
    quantum_seconds: float = 0.5
    """The shortest turn, if `quantum` is None."""
    move_seconds: float = 5.0
    """The cost of a move, until a start was measured."""
    rule: StopRule | None = None
    migrate: bool = True
    """Whether jobs that train move onto more devices when those fall free."""
    seconds: float | None = None
    """How long one start of the fleet may train. None: until all jobs have ended."""


@dataclass(frozen=True, slots=True)
class JobPlan:
    """What a job needs, once it has been planned."""

    memory: JobMemory | None = None
    """None before it has been planned."""
    times: StepTimes = field(default_factory=StepTimes)
    is_measured: bool = False
    """Whether the seconds of a step were measured. Before that they are predicted."""
    seconds_by_devices: tuple[float, ...] = ()
    """The predicted seconds of a step on 1, 2, .. devices, if the job may have more of them."""
    start_seconds: float = 0.0
    is_admitted: bool = False
    """Whether it has its memory. A job that moves keeps its right to it."""
    about: str = ""


@dataclass(frozen=True, slots=True)
class JobRungs:
    """What a job reported at rungs, and where it stands."""

    values: Mapping[int, float] = field(default_factory=dict)
    """The metric at each rung that it has reached, as it was reported the first time."""
    passed: int = 0
    """The last rung from which it went on."""
    rung: int | None = None
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JobExit:
    """Why a job leaves its device as soon as that is free; if it has failed, why."""

    kind: Literal["", "stopped", "failed", "moved"] = ""
    """A job that has moved is started again. "": it does not leave."""
    why: str = ""
    target: int | None = None
    details: str = ""
    width: int = 1
    """The number of devices to which it moves, from its target on."""


@dataclass(frozen=True, slots=True)
class JobTurnState:
    """The turns of a job, and what it waits for."""

    seconds: float = 0.0
    waited: int = 0
    """The turns of others on its device since its last one."""
    tail_left: float = 0.0
    """Seconds that its host tail still takes, estimated from the turns of others."""
    is_aside: bool = False
    """Whether a step of it stands aside between two nodes. It is ready then."""
    input: str = ""
    waits_for: tuple[str, ...] = ()
    ended_devices: int = 0


@dataclass(frozen=True, slots=True)
class JobState:
    """The state of a job."""

    name: str
    phase: Phase = "waiting"
    reason: str = ""
    """Why it is in this phase, for people, with the numbers."""
    priority: int = 0
    """Jobs of a lower one train only where none of this one can."""
    device: int | None = None
    """The first of its devices."""
    width: int = 1
    """The number of its devices."""
    least: int = 1
    most: int = 1
    """It may train on `least` to `most` devices."""
    step: int = 0
    left: int = 0
    metric: float | None = None
    plan: JobPlan = JobPlan()
    rungs: JobRungs = JobRungs()
    exit: JobExit = JobExit()
    turns: JobTurnState = JobTurnState()

    @property
    def why(self) -> str:
        """A line for the board."""
        return "; ".join(filter(None, (self.reason, *self.rungs.remarks)))

    @property
    def step_seconds(self) -> float:
        return self.plan.times.step_seconds

    @property
    def ended(self) -> bool:
        return self.phase in ENDED

    @property
    def alive(self) -> bool:
        """Whether it trains on, or may: a stop rule has to wait for it."""
        return not self.ended and self.exit.kind not in ("stopped", "failed")


@dataclass(frozen=True, slots=True)
class FleetState:
    """The state of all jobs and devices."""

    settings: FleetSettings
    jobs: Mapping[str, JobState] = field(default_factory=dict)
    """By name, in the order of adding."""
    busy: tuple[Command | None, ...] = ()
    last: tuple[str | None, ...] = ()
    """By device: the job that had the last turn."""
    queue: tuple[str, ...] = ()
    """Jobs in the lobby, in the order in which they came."""
    passers: tuple[str, ...] = ()
    """Jobs that were admitted while the first of the lobby waited."""
    leave_seconds: float = 0.0
    interrupted: str = ""
    """Why every job leaves and none is started; empty if none has to."""

    @classmethod
    def without_jobs(cls, settings: FleetSettings) -> "FleetState":
        return cls(settings, busy=(None,) * settings.devices, last=(None,) * settings.devices)

    def with_jobs(self, *jobs: JobState) -> "FleetState":
        """Return the state with these jobs added or replaced."""
        return replace(self, jobs={**self.jobs, **{job.name: job for job in jobs}})

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do: all jobs have ended, or all have left."""
        done = all(
            job.ended or (bool(self.interrupted) and job.device is None)
            for job in self.jobs.values()
        )
        return done and not any(self.busy)


def describe_inputs(streams: Mapping[str, str]) -> tuple[str, ...]:
    """Return a line for every stream that several jobs read. `streams`: that of each job."""
    readers: dict[str, list[str]] = {}
    for job, stream in streams.items():
        readers.setdefault(stream, []).append(job)
    return tuple(
        f"input shared by {', '.join(jobs)}: one decode a sample"
        for stream, jobs in readers.items()
        if stream and len(jobs) > 1
    )
