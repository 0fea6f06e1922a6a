"""What a fleet is told (events) and what it says (commands).

    event -> journal -> decide(state, event) -> commands -> devices -> the next events

A device does one thing at a time: a Start, a Turn or a Leave. Its answer frees it:

    Start    Planned, Failed or Finished
    Turn     TurnEnded, Failed or Finished
    Leave    Left or Failed
    any      DeviceEnded

A Yield is no thing of its own: it ends a Turn early. A turn that ends between two nodes of a step
is gone on with by another Turn, and until then the device has others of higher priority only.

All fields are JSON's types (`memory` is an object of whole numbers), so that a journal can keep an
event as one line. NaN is possible where a metric is.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class JobMemory:
    """The bytes that a job takes, beside the arena of a device, which it borrows for its turns."""

    host_bytes: int
    """Held as long as the job lives: its host arena, its residents while it is parked, the buffers
    of its loaders, its module."""
    passing_bytes: int = 0
    """Taken for a while, by one job of a device at a time: copies at its start, and at its
    end."""
    device_bytes: int = 0
    """What a plain job keeps on its device all the time; 0 for an offloaded one."""
    arena_bytes: int = 0
    """The device's arena, if the device is a CPU. It is as large as any of its jobs needs it."""
    turn_bytes: int = 0
    """What it needs of its device's arena in its turns; 0 for a plain job."""


# ---- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Added:
    """The user has added a job, before or during the run."""

    job: str
    priority: int = 0
    """Of the jobs that could train, only those of the highest priority do."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A job has been built, and its step planned: it could train now."""

    job: str
    device: int
    """Where it lives now."""
    step: int
    """Steps that are done: more than 0 if it resumed."""
    left: int
    """Steps that are left."""
    step_seconds: float
    """Predicted seconds of a step; 0.0 if nobody knows."""
    tail_seconds: float
    """Of these the last ones, in which only the host works."""
    swap_seconds: float
    """Predicted seconds that a change to another job and back costs: park and unpark."""
    memory: JobMemory
    """What it will take once it is admitted."""
    about: str = ""
    """One line of its plan, for people."""
    seconds: float = 0.0
    """What its start took. A move costs as much again. 0.0 if nobody knows."""
    validation_seconds: float = 0.0
    """Predicted seconds of all validations that are left."""
    metric: float | None = None
    """The fleet's metric in the checkpoint from which it goes on; None if it was never logged."""
    input: str = ""
    """The stream that it reads; jobs with the same one share it. "": it has a loader of its own."""


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
    """What the steps took, `swap_seconds` not among them. If the turn was shared, the tail of the
    last step is not among them either."""
    swap_seconds: float
    """Measured park and unpark for this turn; 0.0 if the job before was the same."""
    metric: float | None
    """The newest value of the fleet's metric; None if it was never logged."""
    instead: str = ""
    """What was logged instead, if the metric never was."""
    aside: bool = False
    """Whether a step stands aside between two of its nodes. Its job goes on there in its next turn,
    and nothing else of this event counts but `steps` and the seconds of those."""
    input: str = ""
    """The stream that it reads, as in `Planned`."""
    waits_for: tuple[str, ...] = ()
    """The jobs that have to take their batches before this one can go on. Then the turn ended
    early, between two batches."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A job has trained to its end and is gone from its device."""

    job: str
    device: int
    step: int
    """Steps that are done in all."""
    seconds: float
    """What its last turn took."""
    metric: float | None
    """The last value of the fleet's metric; None if it was never logged."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A job has raised an error and is gone. The other jobs go on."""

    job: str
    device: int | None
    """Where it was; None if it was nowhere."""
    error: str
    """The error in one line."""
    details: str = ""
    """The traceback."""


@dataclass(frozen=True, slots=True)
class Left:
    """A job has left, as it was told to: a snapshot is on disk, its memory is given back."""

    job: str
    device: int
    step: int
    """Steps that its snapshot has."""
    seconds: float = 0.0
    """What leaving took. 0.0 if nobody knows."""


@dataclass(frozen=True, slots=True)
class StopAsked:
    """The user, or a search, wants a job to end early."""

    job: str
    why: str


@dataclass(frozen=True, slots=True)
class InterruptAsked:
    """Ctrl-C: every job leaves."""


@dataclass(frozen=True, slots=True)
class TimeTold:
    """A look at the clock: if the fleet's time is over, every job leaves."""

    seconds: float
    """So long this start of the fleet has trained."""


@dataclass(frozen=True, slots=True)
class DeviceEnded:
    """The process of a device has died, with all jobs on it. The same command goes to its
    successor, which has the same number."""

    device: int
    why: str
    job: str | None = None
    """The job that it ran."""


@dataclass(frozen=True, slots=True)
class Restarted:
    """The fleet goes on after a kill or an interruption. No job lives anywhere now."""


Event = (
    Added
    | Planned
    | TurnEnded
    | Finished
    | Failed
    | Left
    | StopAsked
    | InterruptAsked
    | TimeTold
    | DeviceEnded
    | Restarted
)


# ---- commands -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Build a job on a device, resume it if it has a snapshot, and plan its step."""

    job: str
    device: int


@dataclass(frozen=True, slots=True)
class Turn:
    """Let a job train."""

    job: str
    device: int
    steps: int
    """So many whole steps, at least one. 0: the rest of a step that stands aside."""
    share: bool
    """Whether the job gives the device back when only the host works at its last step."""
    without: tuple[str, ...] = ()
    """The jobs for which it has waited, and which do not come now: it waits no more for them."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Let a job write a snapshot and give all memory back."""

    job: str
    device: int
    why: Literal["stopped", "moved", "interrupted"]
    """stopped: it will not come back. moved: it will be started again, here or elsewhere.
    interrupted: it may come back in another run."""


@dataclass(frozen=True, slots=True)
class Yield:
    """Let a job end its turn after the step under way, because one of higher priority waits. It is
    answered by the `TurnEnded` of that turn."""

    job: str
    device: int
    at_once: bool = False
    """Whether the step under way should stand aside at its next node, instead."""


Command = Start | Turn | Leave | Yield
