"""Events, which a fleet receives, and commands, which it sends.

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


class FleetError(Exception):
    """The fleet cannot run as it was set up. The text says what, which value and what to do."""


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


@dataclass(frozen=True, slots=True)
class Added:
    """The user has added a job, before or during the run."""

    job: str
    priority: int = 0
    """Of the jobs that could train, only those of the highest priority do."""
    least: int = 1
    most: int = 1
    """It may train on `least` to `most` devices."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A job has been built and its step planned: it could train now."""

    job: str
    device: int
    step: int
    """Steps that are done: more than 0 if it resumed."""
    left: int
    times: StepTimes
    memory: JobMemory
    about: str = ""
    seconds: float = 0.0
    """How long its start took, and a move would take. 0.0 is unknown."""
    validation_seconds: float = 0.0
    """Predicted seconds of all validations that are left."""
    metric: float | None = None
    """The fleet's metric in the checkpoint from which it resumed; None if it was never logged."""
    input: str = ""
    """The name of the stream that it reads, and may share; "": it has a loader of its own."""
    devices: int = 1
    """The number of devices for which its step was planned."""
    seconds_by_devices: tuple[float, ...] = ()
    """The predicted seconds of a step on 1, 2, .. devices, if the job may have more of them."""


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """A job has done its turn and has given the device back."""

    job: str
    device: int
    step: int
    steps: int
    left: int
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
    waits_for: tuple[str, ...] = ()
    """The jobs that have to take their batches first. The turn ended early then, between two
    batches."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A job has trained to its end and has left its device."""

    job: str
    device: int
    step: int
    seconds: float
    metric: float | None


@dataclass(frozen=True, slots=True)
class Failed:
    """A job has raised an error and has left its device. The other jobs continue."""

    job: str
    device: int | None
    error: str
    details: str = ""


@dataclass(frozen=True, slots=True)
class Departed:
    """A job has left by command: its checkpoint is on disk, and its memory is free."""

    job: str
    device: int
    step: int
    seconds: float = 0.0


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
    """The process of a device has died with its jobs. A new one takes its number."""

    device: int
    why: str
    job: str | None = None


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


@dataclass(frozen=True, slots=True)
class Start:
    """Build a job on a device, resume it if it has a checkpoint, and plan its step."""

    job: str
    device: int
    width: int = 1
    """The number of its devices, from this one on."""


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
    """Let a turn end after its step, for a job of higher priority. `TurnEnded` answers it."""

    job: str
    device: int
    at_once: bool = False
    """Whether the current step should stand aside at its next node instead."""


Command = Start | Turn | Leave | Yield
