"""A job of a fleet on paper."""

from collections.abc import Callable
from dataclasses import dataclass

from trainers.fleet.deciding.events import JobMemory

NOTHING = JobMemory(0)


def no_metric(step: int) -> float | None:
    return None


@dataclass
class PaperJob:
    """What is true of a job, whatever anybody predicts."""

    name: str
    steps: int
    step_seconds: float = 1.0
    """On one device."""
    least: int = 1
    most: int = 1
    width: int = 1
    """The number of its devices, from the first one on."""
    gain: float = 0.8
    """The part of a device by which each further one speeds a step up."""
    tail_seconds: float = 0.0
    swap_seconds: float = 0.0
    start_seconds: float = 0.0
    leave_seconds: float = 0.0
    predicted: float = 1.0
    """Factor of its predicted step seconds."""
    memory: JobMemory = NOTHING
    memory_of_wide: JobMemory | None = None
    """What it takes on several devices; None: as much as on one."""
    metric: Callable[[int], float | None] = no_metric
    fails_at: int | None = None
    planned_steps: int | None = None
    """The length that it announces, if it is not the true one."""
    done: int = 0
    saves_every: int = 0
    """Steps between two snapshots; 0: only when it leaves."""
    saved: int = 0
    """Steps that its snapshot has."""
    lives: int | None = None
    trained: bool = False
    """Whether it has trained since its start, so that it has taken its memory."""
    tail_until: float = 0.0
    starts: int = 0
    priority: int = 0
    into_step: float | None = None
    """Seconds into the step that stands aside; None: no step does."""
    deaf: bool = False
    """Whether its steps never stand aside, as a step that is being captured does not."""
    input: str = ""
    """Jobs with the same one read together, where they are near enough; "": it reads alone."""
    stream: int = 0
    """The stream that it reads; 0: none."""
    waits_for: frozenset[str] = frozenset()
    """Who has to read first, and has had no turn since."""
    resting: bool = False
    """Whether nobody waits for it until it reads again."""

    def memory_on(self, width: int) -> JobMemory:
        return self.memory if width == 1 else self.memory_of_wide or self.memory

    def seconds_on(self, width: int) -> float:
        return self.step_seconds / (1 + self.gain * (width - 1))
