"""Devices and jobs on paper: what a fleet's commands lead to, and when.

It knows nothing of how anybody decides. It answers commands with events, keeps the clock, and
refuses what no device could do: two things at a time, a turn of a job that lives elsewhere, more
memory than there is.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from trainers.fleet.deciding.decide import decide
from trainers.fleet.deciding.events import (
    Added,
    Command,
    DeviceEnded,
    Event,
    Failed,
    Finished,
    InterruptAsked,
    JobMemory,
    Leave,
    Left,
    Planned,
    Restarted,
    Start,
    Turn,
    TurnEnded,
    Yield,
)
from trainers.fleet.deciding.fleet_state import FleetSettings, FleetState
from trainers.fleet.deciding.schedule import PATIENCE

NOTHING = JobMemory(0)


def no_metric(step: int) -> float | None:
    return None


@dataclass
class PaperJob:
    """What is true of a job, whatever anybody predicts."""

    name: str
    steps: int
    step_seconds: float = 1.0
    tail_seconds: float = 0.0
    swap_seconds: float = 0.0
    start_seconds: float = 0.0
    leave_seconds: float = 0.0
    predicted: float = 1.0
    """Factor of its predicted step seconds."""
    memory: JobMemory = NOTHING
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


@dataclass
class PaperFleet:
    """A fleet run by `decide` on paper."""

    settings: FleetSettings
    jobs: dict[str, PaperJob] = field(default_factory=dict)
    clock: float = 0.0
    journal: list[Event] = field(default_factory=list)
    said: list[tuple[Command, ...]] = field(default_factory=list)
    turns: list[tuple[float, Turn]] = field(default_factory=list)
    moves: int = 0
    swaps: int = 0
    checked: bool = True
    """Whether the laws are checked after every event."""

    def __post_init__(self) -> None:
        self.state = FleetState.of(self.settings)
        self.doing: list[Command | None] = [None] * self.settings.devices
        self.last: list[str | None] = [None] * self.settings.devices
        self.due: list[tuple[float, int, int, Event]] = []
        self._number = 0

    def add(self, job: PaperJob) -> None:
        self.jobs[job.name] = job
        self.tell(Added(job.name, job.priority))

    def tell(self, event: Event) -> None:
        self.journal.append(event)
        self.state, commands = decide(self.state, event)
        self.said.append(commands)
        for command in commands:
            self._begin(command)
        if self.checked:
            self.check()

    def step(self) -> bool:
        """Let the next thing happen that is due; False if nothing is."""
        if not self.due:
            return False
        self.clock, _, device, event = heappop(self.due)
        self._end(device, event)
        self.tell(event)
        return True

    def run(self, most: int = 100_000) -> float:
        """To the end; the seconds that it took."""
        for _ in range(most):
            if not self.step():
                assert self.state.over
                return self.clock
        raise AssertionError(f"not over after {most} events")

    # ---- what happens besides ---------------------------------------------------------------

    def end_device(self, device: int) -> None:
        """The process of a device dies."""
        command = self.doing[device]
        self.doing[device] = None
        self.last[device] = None
        self.due = [entry for entry in self.due if entry[2] != device]
        for job in self.jobs.values():
            if job.lives == device:
                self._gone(job)
        self.tell(DeviceEnded(device, "killed", command.job if command else None))

    def kill(self) -> None:
        """Everything dies, and is started again from the journal."""
        self.due = []
        self.doing = [None] * self.settings.devices
        self.last = [None] * self.settings.devices
        for job in self.jobs.values():
            self._gone(job)
        self.tell(Restarted())

    def replay(self) -> None:
        """The journal, told again, gives the same state and the same commands."""
        state = FleetState.of(self.settings)
        for event, commands in zip(self.journal, self.said, strict=True):
            state, again = decide(state, event)
            assert again == commands
        assert state == self.state

    def interrupt(self) -> None:
        self.tell(InterruptAsked())

    # ---- devices ----------------------------------------------------------------------------

    def _begin(self, command: Command) -> None:
        job, device = self.jobs[command.job], command.device
        if isinstance(command, Yield):
            assert isinstance(self.doing[device], Turn)  # on paper a turn goes on to its end
            return
        if isinstance(command, Turn):
            above = [
                other.name
                for other in self.state.jobs.values()
                if other.device == device and other.phase == "ready" and not other.ending
                if other.priority > job.priority
            ]
            assert not above, f"{command} while {above} could train there"
        assert self.doing[device] is None, f"{command} while device {device} does another thing"
        self.doing[device] = command
        match command:
            case Start():
                assert job.lives is None
                job.lives, job.trained, job.done = device, False, job.saved
                job.starts += 1
                left = (job.planned_steps or job.steps) - job.done
                planned = Planned(
                    job.name, device, job.done, max(1, left), job.step_seconds * job.predicted,
                    job.tail_seconds, job.swap_seconds, job.memory, seconds=job.start_seconds,
                )  # fmt: skip
                if job.fails_at == 0:
                    self._later(job.start_seconds, device, Failed(job.name, device, "cannot start"))
                else:
                    self._later(job.start_seconds, device, planned)
            case Leave():
                assert job.lives == device
                self.moves += command.why == "moved"
                left = Left(job.name, device, job.done, job.leave_seconds)
                self._later(job.leave_seconds, device, left)
            case Turn():
                assert job.lives == device and command.steps >= 1
                self._turn(job, command)

    def _turn(self, job: PaperJob, turn: Turn) -> None:
        device = turn.device
        job.trained = True
        self.turns.append((self.clock, turn))
        swap = job.swap_seconds if self.last[device] != job.name else 0.0
        self.swaps += self.last[device] != job.name
        self.last[device] = job.name
        wait = max(0.0, job.tail_until - self.clock)
        steps = min(turn.steps, job.steps - job.done)
        failing = job.fails_at is not None and job.fails_at <= job.done + steps
        seconds = steps * job.step_seconds
        step = job.done + steps
        if failing:
            self._later(seconds, device, Failed(job.name, device, "diverged", "a\ntraceback"))
        elif step == job.steps:
            whole = swap + wait + seconds
            self._later(whole, device, Finished(job.name, device, step, seconds, job.metric(step)))
        else:
            if turn.share:
                seconds -= job.tail_seconds
                job.tail_until = self.clock + swap + wait + seconds + job.tail_seconds
            left = (job.planned_steps or job.steps) - step
            ended = TurnEnded(
                job.name, device, step, steps, max(1, left), seconds, swap, job.metric(step)
            )
            self._later(swap + wait + seconds, device, ended)

    def _later(self, seconds: float, device: int, event: Event) -> None:
        self._number += 1
        heappush(self.due, (self.clock + seconds, self._number, device, event))

    def _end(self, device: int, event: Event) -> None:
        """A device has answered."""
        self.doing[device] = None
        job = self.jobs[event.job]  # pyright: ignore[reportAttributeAccessIssue]
        match event:
            case TurnEnded():
                job.done = event.step
                if job.saves_every:
                    job.saved = max(job.saved, job.done - job.done % job.saves_every)
            case Left():
                job.saved = event.step
                self._gone(job)
            case Finished() | Failed():
                self._gone(job)
            case _:
                pass  # a start that is planned changes nothing of what the job has done

    def _gone(self, job: PaperJob) -> None:
        job.lives, job.trained, job.tail_until = None, False, 0.0

    # ---- laws -------------------------------------------------------------------------------

    def check(self) -> None:
        settings, state = self.settings, self.state
        assert [*state.busy] == self.doing
        for job in state.jobs.values():
            paper = self.jobs[job.name]
            assert job.device == paper.lives, (job, paper)
            doing = [c for c in self.doing if c is not None and c.job == job.name]
            wanted = {"starting": Start, "running": Turn, "leaving": Leave}.get(job.phase)
            assert [type(c) for c in doing] == ([wanted] if wanted else []), (job, doing)
            assert (job.phase in ("waiting", "finished", "stopped", "failed")) <= (
                paper.lives is None
            )
            assert job.waited <= PATIENCE + len(state.jobs)
        taken = [job.memory for job in self.jobs.values() if job.trained]
        host = sum(m.host_bytes for m in taken)
        for device in range(settings.devices):
            here = [j.memory for j in self.jobs.values() if j.trained and j.lives == device]
            host += max((m.passing_bytes for m in here), default=0)
            host += max((m.arena_bytes for m in here), default=0)
            own = settings.arena_bytes + sum(m.device_bytes for m in here)
            assert not settings.device_bytes or own <= settings.device_bytes
        assert not settings.host_bytes or host <= settings.host_bytes


def bound(jobs: list[PaperJob], devices: int) -> float:
    """No schedule ends earlier."""
    seconds = [job.steps * job.step_seconds for job in jobs]
    return max(max(seconds), sum(seconds) / devices)
