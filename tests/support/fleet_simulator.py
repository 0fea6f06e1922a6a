"""Devices and jobs on paper: what a fleet's commands lead to, and when.

It knows nothing of how anybody decides. It answers commands with events, keeps the clock, and
refuses what no device could do: two things at a time, a turn of a job that lives elsewhere, more
memory than there is.
"""

from dataclasses import dataclass, field
from heapq import heappop, heappush

from support.paper_job import PaperJob

from trainers.fleet.deciding.decide import decide
from trainers.fleet.deciding.events import (
    Added,
    Command,
    Departed,
    DeviceEnded,
    Event,
    Failed,
    Finished,
    InterruptAsked,
    Leave,
    Planned,
    Restarted,
    Start,
    StepTimes,
    Turn,
    TurnEnded,
    Yield,
)
from trainers.fleet.deciding.fleet_state import FleetSettings, FleetState, JobState
from trainers.fleet.deciding.schedule import PATIENCE


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
    window: int = 3
    """Jobs that read together are at most so many steps apart."""
    streams: int = 0

    def __post_init__(self) -> None:
        self.state = FleetState.without_jobs(self.settings)
        self.doing: list[Command | None] = [None] * self.settings.devices
        self.began: list[float] = [0.0] * self.settings.devices
        """When the steps of the turn began, after swaps and waits."""
        self.cuts = 0
        self.last: list[str | None] = [None] * self.settings.devices
        self.due: list[tuple[float, int, int, Event]] = []
        self._number = 0

    def add(self, job: PaperJob) -> None:
        self.jobs[job.name] = job
        self.tell(Added(job.name, job.priority, job.least, job.most))

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
                assert self.state.is_done
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
        state = FleetState.without_jobs(self.settings)
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
            turn = self.doing[device]
            assert isinstance(turn, Turn)
            if command.at_once and not job.deaf:
                self._cut(job, turn)
            return  # on paper the turn goes on to its end otherwise
        if isinstance(command, Turn):
            above = [
                other
                for other in self.state.jobs.values()
                if other.device == device and other.phase == "ready" and not other.exit.kind
                if other.priority > job.priority
            ]
            top = [o for o in above if o.priority == max(other.priority for other in above)]
            if not command.steps:  # the first of them need a larger arena, or wait for others
                room = job.memory.turn_bytes
                above = top = [
                    other
                    for other in top
                    if self.jobs[other.name].memory.turn_bytes <= room
                    if self._lent(other.name) == other.name
                ]
            lent = any(self._lent(other.name) == job.name for other in top)
            assert lent or not above, f"{command} while {above[0].name} could train there"
            coming = {name for name in job.waits_for if self._comes(name, device)}
            assert not coming, f"{command} while {job.name} waits for {coming}"
            assert job.waits_for == {*command.without}
        assert self.doing[device] is None, f"{command} while device {device} does another thing"
        self.doing[device] = command
        match command:
            case Start():
                assert job.lives is None
                job.width = command.width
                self._check_alone(job, device)
                job.lives, job.trained, job.done = device, False, job.saved
                job.starts += 1
                self._join(job)
                left = (job.planned_steps or job.steps) - job.done
                predicted = job.seconds_on(job.width) * job.predicted
                planned = Planned(
                    job.name, device, job.done, max(1, left), StepTimes(
                        predicted, job.tail_seconds, job.swap_seconds
                    ), job.memory_on(job.width), seconds=job.start_seconds,
                    devices=job.width,
                    seconds_by_devices=tuple(map(job.seconds_on, range(1, job.most + 1))),
                )  # fmt: skip
                if job.fails_at == 0:
                    self._later(job.start_seconds, device, Failed(job.name, device, "cannot start"))
                else:
                    self._later(job.start_seconds, device, planned)
            case Leave():
                assert job.lives == device
                self.moves += command.why == "moved"
                rest = job.leave_seconds
                if job.into_step is not None:  # a step that stands aside ends first
                    rest += job.seconds_on(job.width) - job.into_step
                    job.done, job.into_step = job.done + 1, None
                self._later(rest, device, Departed(job.name, device, job.done, job.leave_seconds))
            case Turn():
                assert job.lives == device
                assert (command.steps == 0) == (job.into_step is not None)
                self._turn(job, command)

    def _check_alone(self, job: PaperJob, device: int) -> None:
        """A job that has several devices shares them with nobody, nor does another one share."""
        assert job.least <= job.width <= job.most
        mine = {*range(device, device + job.width)}
        assert max(mine) < self.settings.devices
        for other in self.jobs.values():
            if other.lives is not None and max(job.width, other.width) > 1:
                assert mine.isdisjoint(range(other.lives, other.lives + other.width))

    def _turn(self, job: PaperJob, turn: Turn) -> None:
        device = turn.device
        job.trained = True
        self.turns.append((self.clock, turn))
        swap = job.swap_seconds if self.last[device] != job.name else 0.0
        self.swaps += self.last[device] != job.name
        self.last[device] = job.name
        wait = max(0.0, job.tail_until - self.clock)
        steps = min(turn.steps or 1, job.steps - job.done)
        failing = job.fails_at is not None and job.fails_at <= job.done + steps
        seconds = steps * job.seconds_on(job.width) - (job.into_step or 0.0)
        self.began[device] = self.clock + swap + wait
        ahead, names = self._input_left(job, turn)
        if steps > ahead and job.into_step is None:
            steps, failing = ahead, job.fails_at is not None and job.fails_at <= job.done + ahead
            seconds = steps * job.seconds_on(job.width)
        else:
            names = ()
        job.into_step = None
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
                job.name, device, step, steps, max(1, left), seconds, swap, job.metric(step),
                input=str(job.stream or ""), waits_for=names,
            )  # fmt: skip
            self._later(swap + wait + seconds, device, ended)

    def _cut(self, job: PaperJob, turn: Turn) -> None:
        """The step under way stands aside, if the turn has come to one."""
        [due] = [entry for entry in self.due if entry[2] == turn.device]
        ended, elapsed = due[3], self.clock - self.began[turn.device]
        if not isinstance(ended, TurnEnded | Finished) or turn.steps == 0 or elapsed <= 0:
            return
        if (isinstance(ended, TurnEnded) and ended.aside) or ended.step == job.done:
            return  # it does already, or has no step to make
        assert not turn.share
        each = job.seconds_on(job.width)
        steps = min(int(elapsed / each), ended.step - job.done - 1)
        self.due.remove(due)
        job.into_step = min(elapsed - steps * each, each)
        self.cuts += 1
        aside = TurnEnded(
            job.name, turn.device, job.done + steps, steps, 1, steps * each, 0.0, None, aside=True,
        )  # fmt: skip
        self._later(0.0, turn.device, aside)

    # ---- inputs -----------------------------------------------------------------------------

    def _comes(self, name: str, device: int) -> bool:
        other = self.state.jobs[name]
        alive = other.phase in ("ready", "running") and not other.exit.kind
        return alive and other.device == device

    def _lent(self, name: str) -> str:
        """Who has the turn of a job that waits."""
        device, seen = self.jobs[name].lives, {name}
        assert device is not None
        order = self.state.jobs[name].turns.waits_for
        while coming := [n for n in order if self._comes(n, device)]:
            name, order = coming[0], self.state.jobs[coming[0]].turns.waits_for
            assert name not in seen, "jobs wait in a circle"
            seen.add(name)
        return name

    def _beside(self, job: PaperJob) -> list[PaperJob]:
        """Who reads the same stream, and is waited for."""
        return [
            other
            for other in self.jobs.values()
            if other is not job and other.stream == job.stream and not other.resting
        ]

    def _input_left(self, job: PaperJob, turn: Turn) -> tuple[int, tuple[str, ...]]:
        """How many steps the job finds input for, and who must read before there is more."""
        for name in turn.without:
            self.jobs[name].resting = True
        beside = self._beside(job)
        if job.resting and beside and job.done < min(other.done for other in beside):
            self._join(job)  # its batches are gone
            beside = self._beside(job)
        job.waits_for, job.resting = frozenset(), False
        if not job.stream or not beside:
            return 10**9, ()
        slowest = min(other.done for other in beside)
        names = tuple(other.name for other in beside if other.done == slowest)
        return max(0, slowest + self.window - job.done), names

    def _join(self, job: PaperJob) -> None:
        """A job looks for a stream that is near."""
        job.stream = 0
        if not job.input:
            return
        near = [
            other.stream
            for other in self.jobs.values()
            if other is not job and other.input == job.input and other.lives == job.lives
            if other.stream and not other.resting and abs(other.done - job.done) <= self.window
        ]
        self.streams += 1
        job.stream = near[0] if near else self.streams

    def _later(self, seconds: float, device: int, event: Event) -> None:
        self._number += 1
        heappush(self.due, (self.clock + seconds, self._number, device, event))

    def _end(self, device: int, event: Event) -> None:
        """A device has answered."""
        self.doing[device] = None
        name: str = event.job  # pyright: ignore[reportAttributeAccessIssue,reportAssignmentType]
        job = self.jobs[name]
        match event:
            case TurnEnded():
                if not event.aside:
                    for other in self.jobs.values():
                        other.waits_for -= {job.name}
                    job.waits_for = frozenset(event.waits_for)
                job.done = event.step
                if job.saves_every:
                    job.saved = max(job.saved, job.done - job.done % job.saves_every)
            case Departed():
                job.saved = event.step
                self._gone(job)
            case Finished() | Failed():
                self._gone(job)
            case _:
                pass  # a start that is planned changes nothing of what the job has done

    def _gone(self, job: PaperJob) -> None:
        job.lives, job.trained, job.tail_until, job.into_step = None, False, 0.0, None
        job.stream, job.waits_for, job.resting = 0, frozenset(), False

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
            assert job.turns.waited <= PATIENCE + len(state.jobs)
            if job.turns.is_aside:
                self._check_beside(job)
        taken = [job.memory for job in self.jobs.values() if job.trained]
        host = sum(m.host_bytes for m in taken)
        host += sum(j.memory.turn_bytes for j in self.jobs.values() if j.into_step is not None)
        for device in range(settings.devices):
            here = [j.memory for j in self.jobs.values() if j.trained and j.lives == device]
            host += max((m.passing_bytes for m in here), default=0)
            host += max((m.arena_bytes for m in here), default=0)
            own = settings.arena_bytes + sum(m.device_bytes for m in here)
            assert not settings.device_bytes or own <= settings.device_bytes
        assert not settings.host_bytes or host <= settings.host_bytes

    def _check_beside(self, aside: JobState) -> None:
        """Beside a step that stands aside only jobs of higher priority come, within its arena."""
        assert aside.device is not None and aside.phase == "ready"
        command = self.doing[aside.device]
        if command is not None and command.job != aside.name:
            other, paper = self.state.jobs[command.job], self.jobs[command.job]
            assert other.priority > aside.priority
            fits = paper.memory.turn_bytes <= self.jobs[aside.name].memory.turn_bytes
            assert fits or not isinstance(command, Turn)


def bound(jobs: list[PaperJob], devices: int) -> float:
    """No schedule ends earlier."""
    seconds = [job.steps * job.step_seconds for job in jobs]
    return max(max(seconds), sum(seconds) / devices)
