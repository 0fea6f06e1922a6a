"""Events, which a fleet receives, and commands, which it sends.

    event -> journal -> decide(state, event) -> commands -> devices -> the next events

A device does one thing at a time: a Start, a Turn or a Leave. Its answer frees it:

    Start    Planned, Failed or Finished
    Turn     TurnEnded, Failed or Finished
    Leave    Departed or Failed
    any      DeviceEnded

A Yield ends a Turn early and has no answer of its own. A turn that ends in the middle of a step is
resumed by another Turn. Until then the device trains only jobs of higher priority.

All fields are JSON's types, so that a journal can keep an event as one line. A metric may be NaN.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class JobMemory:
    """The bytes that a job takes, besides the arena of its device, which it borrows for a turn."""

    host_bytes: int
    """Held as long as the job is on a device: its host arena, its residents while it is parked, the
    buffers of its loaders, its module."""
    passing_bytes: int = 0
    """Held by one job of a device at a time: copies at its start and at its end."""
    device_bytes: int = 0
    """Held on the device all the time by a plain job; 0 for an offloaded one."""
    arena_bytes: int = 0
    """The device's arena, if the device is a CPU. Its size is the largest that a job needs."""
    turn_bytes: int = 0
    """The part of the device's arena that it needs in its turns; 0 for a plain job."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The seconds of a job's steps. 0.0 is unknown."""

    step_seconds: float = 0.0
    """One step."""
    tail_seconds: float = 0.0
    """The end of a step, in which only the host works."""
    swap_seconds: float = 0.0
    """A change to another job and back: park and unpark."""


# ---- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Added:
    """The user has added a job, before or during the run."""

    job: str
    priority: int = 0
    """Of the jobs that could train, only those of the highest priority do."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A job has been built and its step planned: it could train now."""

    job: str
    device: int
    """Its device."""
    step: int
    """Steps that are done: more than 0 if it resumed."""
    left: int
    """Steps that are left."""
    times: StepTimes
    """As predicted by its plan."""
    memory: JobMemory
    """What it will take once it is admitted."""
    about: str = ""
    """Its plan on one line, for people."""
    seconds: float = 0.0
    """How long its start took, and a move would take. 0.0 is unknown."""
    validation_seconds: float = 0.0
    """Predicted seconds of all validations that are left."""
    metric: float | None = None
    """The fleet's metric in the checkpoint from which it resumed; None if it was never logged."""
    input: str = ""
    """The name of the stream that it reads, and may share; "": it has a loader of its own."""


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """A job has done its turn and has given the device back."""

    job: str
    device: int
    step: int
    """Steps that are done in all."""
    steps: int
    """Steps that were done in this turn."""
    left: int
    """Steps that are left."""
    seconds: float
    """The time of the steps without `swap_seconds`; if the turn was shared, without the tail of the
    last step, too."""
    swap_seconds: float
    """Measured park and unpark for this turn; 0.0 if the job before was the same."""
    metric: float | None
    """The newest value of the fleet's metric; None if it was never logged."""
    instead: str = ""
    """The names that were logged instead, if the metric never was."""
    aside: bool = False
    """Whether a step stands aside in its middle. The next turn resumes it. Only `steps` and
    `seconds` of this event count then."""
    input: str = ""
    """The stream that it reads, as in `Planned`."""
    waits_for: tuple[str, ...] = ()
    """The jobs that have to take their batches first. The turn ended early then, between two
    batches."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A job has trained to its end and has left its device."""

    job: str
    device: int
    step: int
    """Steps that are done in all."""
    seconds: float
    """The time of its last turn."""
    metric: float | None
    """The last value of the fleet's metric; None if it was never logged."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A job has raised an error and has left its device. The other jobs continue."""

    job: str
    device: int | None
    error: str
    """The error in one line."""
    details: str = ""
    """The traceback."""


@dataclass(frozen=True, slots=True)
class Departed:
    """A job has left by command: its checkpoint is on disk, and its memory is free."""

    job: str
    device: int
    step: int
    """The steps in its checkpoint."""
    seconds: float = 0.0
    """How long leaving took. 0.0 is unknown."""


@dataclass(frozen=True, slots=True)
class StopAsked:
    """The user, or a search, wants a job to end early."""

    job: str
    why: str


@dataclass(frozen=True, slots=True)
class InterruptAsked:
    """Ctrl-C: every job leaves."""


@dataclass(frozen=True, slots=True)
class TimeChecked:
    """If the fleet's time is over, every job leaves."""

    seconds: float
    """How long this start of the fleet has trained."""


@dataclass(frozen=True, slots=True)
class DeviceEnded:
    """The process of a device has died, with all jobs on it. A new one with the same number
    replaces it."""

    device: int
    why: str
    job: str | None = None
    """The job that it ran."""


@dataclass(frozen=True, slots=True)
class Restarted:
    """The fleet resumes after a kill or an interruption. No job is on a device."""


Event = (
    Added
    | Planned
    | TurnEnded
    | Finished
    | Failed
    | Departed
    | StopAsked
    | InterruptAsked
    | TimeChecked
    | DeviceEnded
    | Restarted
)


# ---- commands -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Build a job on a device, resume it if it has a checkpoint, and plan its step."""

    job: str
    device: int


@dataclass(frozen=True, slots=True)
class Turn:
    """Let a job train."""

    job: str
    device: int
    steps: int
    """The number of whole steps; 0: the rest of a step that stands aside."""
    share: bool
    """Whether the job gives the device back when only the host works on its last step."""
    without: tuple[str, ...] = ()
    """The jobs for which it does not wait any more, because they cannot read now."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Let a job write a checkpoint and free all its memory."""

    job: str
    device: int
    why: Literal["stopped", "moved", "interrupted"]
    """stopped: it will not be started again. moved: it will, here or elsewhere. interrupted: it may
    be started by another run."""


@dataclass(frozen=True, slots=True)
class Yield:
    """Let a job end its turn after the current step, because one of higher priority waits. The
    answer is the `TurnEnded` of that turn."""

    job: str
    device: int
    at_once: bool = False
    """Whether the current step should stand aside at its next node instead."""


Command = Start | Turn | Leave | Yield
