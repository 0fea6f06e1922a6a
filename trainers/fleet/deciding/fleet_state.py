"""What is known of a fleet: plain values, which `decide` replaces and nobody writes.

    waiting -> starting -> (lobby) -> ready <-> running -> finished
       ^                                |         '-> at_rung -> ready, or leaving
       '---- moved, parked -- leaving <-'              leaving -> stopped, failed

A job is in exactly one phase. From `starting` to `leaving` it lives on one device, but for one that
stands at a rung: it may have left to make room, and then lives nowhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from trainers.fleet.deciding.events import Command, JobMemory
from trainers.fleet.deciding.stop_rule import StopRule

Phase = Literal[
    "waiting", "starting", "lobby", "ready", "running", "at_rung", "leaving",
    "finished", "stopped", "failed",
]  # fmt: skip
ENDED: tuple[Phase, ...] = ("finished", "stopped", "failed")
"""Phases that no job leaves."""
Ending = Literal["", "stopped", "failed", "moved", "interrupted"]
"""What a job becomes when it has left: stopped, failed, or one that is started again."""


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """What is the same for the whole run."""

    devices: int = 1
    """Devices of one kind, numbered from 0."""
    host_bytes: int = 0
    """Of the host's memory, what all jobs together may take. 0: no limit is known."""
    device_bytes: int = 0
    """Of each device, what its jobs and its arena may take. 0: no limit is known."""
    arena_bytes: int = 0
    """The arena of each device."""
    quantum: int | None = None
    """Steps of a turn. None: from seconds."""
    quantum_seconds: float = 0.5
    """The shortest turn, where `quantum` is None. A turn is at least 50 swaps long, too."""
    move_seconds: float = 5.0
    """What a move costs as long as no start was measured."""
    rule: StopRule | None = None
    """Who ends early."""
    seconds: float | None = None
    """So long a start of the fleet may train. None: until all jobs have ended."""


@dataclass(frozen=True, slots=True)
class JobState:
    """What is known of a job."""

    name: str
    phase: Phase = "waiting"
    reason: str = ""
    """Why it is in this phase, for people, with the numbers."""
    priority: int = 0
    """Jobs of a lower one train only where none of this one can."""
    remarks: tuple[str, ...] = ()
    """What is said of it as long as it is there."""
    device: int | None = None
    """Where it lives."""
    step: int = 0
    """Steps that are done."""
    left: int = 0
    """Steps that are left, once it has been planned."""
    step_seconds: float = 0.0
    """Of one step: measured, before that predicted. 0.0: nobody knows."""
    measured: bool = False
    """Whether `step_seconds` was measured."""
    tail_seconds: float = 0.0
    """Of a step the last seconds, in which only the host works."""
    swap_seconds: float = 0.0
    """What a change to another job and back costs."""
    start_seconds: float = 0.0
    """What its start took. 0.0: nobody knows."""
    memory: JobMemory | None = None
    """What it takes, once it has been planned."""
    admitted: bool = False
    """Whether it has its memory. A job that moves keeps its right to it."""
    about: str = ""
    """One line of its plan."""
    metric: float | None = None
    """The newest value of the metric."""
    values: Mapping[int, float] = field(default_factory=dict)
    """The metric at each rung that it has reached, as it was reported the first time."""
    passed: int = 0
    """The last rung from which it went on."""
    rung: int | None = None
    """The rung at which it stands."""
    ending: Ending = ""
    """What it becomes when it has left: it leaves as soon as its device is free."""
    ending_why: str = ""
    """Why it leaves, for people."""
    target: int | None = None
    """The device to which it moves."""
    waited: int = 0
    """Turns that others had on its device since its last one."""
    tail_left: float = 0.0
    """Seconds that its host tail still takes, as far as turns of others tell."""
    seconds: float = 0.0
    """All its turns."""
    ended_devices: int = 0
    """How many devices ended while they ran it."""
    moves: int = 0
    """How often it went to another device."""
    error: str = ""
    """Why it failed, in one line."""
    details: str = ""
    """The traceback."""
    aside: bool = False
    """Whether a step of it stands aside between two nodes. It is ready then."""
    input: str = ""
    """The stream that it reads; jobs with the same one share it. "": it has a loader of its own."""
    waits_for: tuple[str, ...] = ()
    """Jobs that have to take their batches first, and have had no turn since it said so."""

    @property
    def why(self) -> str:
        """A line for the board."""
        return "; ".join(filter(None, (self.reason, *self.remarks)))

    @property
    def ended(self) -> bool:
        return self.phase in ENDED

    @property
    def alive(self) -> bool:
        """Whether it goes on, or may go on: a stop rule has to wait for it."""
        return not self.ended and self.ending not in ("stopped", "failed")


@dataclass(frozen=True, slots=True)
class FleetState:
    """What is known of all jobs and devices."""

    settings: FleetSettings
    jobs: Mapping[str, JobState] = field(default_factory=dict)
    """By name, in the order of adding."""
    busy: tuple[Command | None, ...] = ()
    """By device: what it does."""
    last: tuple[str | None, ...] = ()
    """By device: who had the last turn."""
    queue: tuple[str, ...] = ()
    """Jobs in the lobby, in the order in which they came."""
    passers: tuple[str, ...] = ()
    """Who was admitted while the first of the lobby waited."""
    leave_seconds: float = 0.0
    """The longest leaving that was measured."""
    interrupted: str = ""
    """Why every job leaves, and none is started; empty if it is not so."""

    @classmethod
    def of(cls, settings: FleetSettings) -> "FleetState":
        """A fleet without jobs."""
        return cls(settings, busy=(None,) * settings.devices, last=(None,) * settings.devices)

    def put(self, *jobs: JobState) -> "FleetState":
        """The state with other values for some jobs."""
        return replace(self, jobs={**self.jobs, **{job.name: job for job in jobs}})

    @property
    def over(self) -> bool:
        """Whether nothing is left to do: all jobs have ended, or all have left."""
        done = all(
            job.ended or (bool(self.interrupted) and job.device is None)
            for job in self.jobs.values()
        )
        return done and not any(self.busy)
