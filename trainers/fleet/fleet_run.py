"""The run of a fleet: events of jobs go into the journal, and decisions to the devices.

The loop runs in the caller's thread. It decides and never trains. What ends it early (Ctrl-C, the
end of its time) is an event as well: an exception between an event and its decision would lose it.
"""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from queue import SimpleQueue
from types import FrameType, MappingProxyType

from trainers.fleet.deciding.decide import decide
from trainers.fleet.deciding.events import (
    Command,
    DeviceEnded,
    Event,
    Finished,
    FleetError,
    InterruptAsked,
    Leave,
    Planned,
    Restarted,
    TimeChecked,
    Turn,
    TurnEnded,
)
from trainers.fleet.deciding.fleet_state import FleetSettings, FleetState, JobState
from trainers.fleet.fleet_options import FleetJobs, FleetOptions
from trainers.fleet.hosting.device_process import (
    DeviceHost,
    DeviceProcess,
    InputProcess,
    needs_input_process,
)
from trainers.fleet.inputs.input_link import InputAddress
from trainers.fleet.keeping.fleet_result import FleetResult, JobResult
from trainers.fleet.keeping.journal import Journal

Watch = Callable[[FleetState, Event], None]
OnEnd = Callable[[JobResult, Mapping[int, float]], None]
Host = DeviceHost | DeviceProcess


class JobReports:
    """What the jobs have reported: their first plans, and the metric of each by its step."""

    def __init__(self) -> None:
        self.plans: dict[str, Planned] = {}
        self.metrics: dict[str, dict[int, float]] = {}

    def note(self, event: Event) -> None:
        if isinstance(event, Planned):
            self.plans.setdefault(event.job, event)
        if isinstance(event, Planned | TurnEnded | Finished) and event.metric is not None:
            self.metrics.setdefault(event.job, {})[event.step] = event.metric


class FleetRun:
    """A run that has not begun has no state."""

    def __init__(self, options: FleetOptions, jobs: FleetJobs, watch: Watch | None) -> None:
        self.state: FleetState | None = None
        self.events: SimpleQueue[Event] = SimpleQueue()
        self.reports = JobReports()
        self.on_end: list[OnEnd] = []
        self._options = options
        self._jobs = jobs
        self._watch = watch
        self._hosts: list[Host] = []
        self._input_address: InputAddress | None = None
        self._held_turns: list[Turn] = []
        """Turns that wait for `train`, because only plans were asked for."""
        self._journal = Journal(options.folder)
        self._resources = ExitStack()

    def begin(self, lock: threading.Lock) -> None:
        """Read the journal, and send the jobs to the hosts. `lock`: held while a job is added."""
        settings = self._options.settings()
        past = self._journal.open(self._options.identity())
        if needs_input_process(self._options.in_processes, len(self._options.devices)):
            self._input_address = self._resources.enter_context(InputProcess()).address
        self._hosts = [self._new_host(number) for number in range(len(self._options.devices))]
        state = self._replay(past, settings)
        with lock:
            self.state, names = _with_settings(state, settings), tuple(self._jobs.hosted)
        self._journal.begin(settings)
        if past:
            self._handle(Restarted(), hold_turns=True)
        for name in names:
            if name not in self.state.jobs:
                self._handle(self._jobs.added(name), hold_turns=True)

    def _replay(self, past: list[Event | FleetSettings], settings: FleetSettings) -> FleetState:
        """Return the state after the events of earlier processes."""
        path = self._journal.path
        state = FleetState.without_jobs(settings)
        for event in past:
            if isinstance(event, FleetSettings):
                state = _with_settings(state, replace(event, rule=settings.rule))
                continue
            try:
                state, _ = decide(before := state, event)
            except Exception as error:  # any error of events that no fleet has written
                raise FleetError(
                    f"{path} is damaged ({event} cannot come there: {error!r}): delete the folder"
                    " to begin anew"
                ) from error
            self.reports.note(event)
            self._call_on_end(before, state)
        for job in state.jobs.values():
            now = self._jobs.hosted.get(job.name)
            if now and not job.ended and (now.least, now.most) != (job.least, job.most):
                raise FleetError(
                    f"job {job.name} had devices={job.least}..{job.most} and has {now.least}.."
                    f"{now.most} now: give it the same, or another folder"
                )
        if unknown := set(state.jobs) - set(self._jobs.hosted):
            raise FleetError(
                f"{path} has jobs that were not added: {', '.join(sorted(unknown))}. Add them, or"
                " give another folder"
            )
        return state

    def _new_host(self, number: int) -> Host:
        kind = DeviceProcess if self._options.in_processes else DeviceHost
        settings = replace(self._options.seat(number), inputs=self._input_address)
        return self._resources.enter_context(kind(settings, self.events.put))

    def plan(self) -> None:
        """Build and plan every job for which there is memory. Turns wait for `train`."""
        assert self.state is not None
        while not self.events.empty() or len(self._held_turns) < sum(
            command is not None for command in self.state.busy
        ):
            self._handle(self.events.get(), hold_turns=True)

    def train(self, is_done: Callable[[], bool]) -> bool:
        """Train until `is_done`. Return whether Ctrl-C ended it."""
        with self._early_end() as interrupts:
            turns, self._held_turns = self._held_turns, []
            for turn in turns:
                self._send(turn)
            while not is_done():
                self._handle(self.events.get())
        return bool(interrupts)

    def _handle(self, event: Event, hold_turns: bool = False) -> None:
        """Write an event down, decide, and send the commands."""
        assert self.state is not None
        self._journal.write(event)
        if isinstance(event, DeviceEnded):
            self._hosts[event.device] = self._new_host(event.device)
        self.state, commands = decide(before := self.state, event)
        self.reports.note(event)
        for command in commands:
            if hold_turns and isinstance(command, Turn):
                self._held_turns.append(command)
            else:
                self._send(command)
        self._call_on_end(before, self.state)
        if self._watch is not None:
            self._watch(self.state, event)

    def _send(self, command: Command) -> None:
        self._hosts[command.device].do(command, self._jobs.hosted[command.job])

    def _call_on_end(self, before: FleetState, after: FleetState) -> None:
        for name, job in after.jobs.items():
            if self.on_end and job.ended and not before.jobs[name].ended:
                for call in self.on_end:
                    call(self._job_result(job), job.rungs.values)

    @contextmanager
    def _early_end(self) -> Iterator[list[int]]:
        """In this block let all jobs leave after the first Ctrl-C, which the yielded list has then,
        or when the time is over. A second Ctrl-C is raised at once."""
        interrupts: list[int] = []

        def interrupt(number: int, _frame: FrameType | None) -> None:
            if interrupts:
                raise KeyboardInterrupt
            interrupts.append(number)
            self.events.put(InterruptAsked())

        seconds = self._options.seconds or 0.0
        timer = threading.Timer(seconds, lambda: self.events.put(TimeChecked(seconds)))
        timer.daemon = True
        is_main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, interrupt) if is_main else None
        if seconds:
            timer.start()
        try:
            yield interrupts
        finally:
            timer.cancel()
            if is_main:
                signal.signal(signal.SIGINT, before)

    def close(self, is_first: bool) -> None:
        """End all threads and processes. `is_first`: jobs may still wait for their first turn."""
        if is_first and self._held_turns and self.state is not None:
            for name, job in self.state.jobs.items():
                if job.device is not None and not job.ended:
                    self._send(Leave(name, job.device, "interrupted"))
                    self.events.get()
            self._held_turns = []
        self._resources.close()
        self._journal.close()

    def result(self) -> FleetResult:
        """Return the results so far."""
        states = self.state.jobs if self.state is not None else {}
        return FleetResult(
            MappingProxyType({name: self._job_result(job) for name, job in states.items()}),
            MappingProxyType({name: dict(seen) for name, seen in self.reports.metrics.items()}),
            self._options.metric,
            self._options.mode,
        )

    def _job_result(self, job: JobState) -> JobResult:
        return JobResult(
            job.name, job.phase, job.step, job.metric, job.turns.seconds, job.why,
            job.exit.details, self._jobs.folder(job.name),
        )  # fmt: skip


def _with_settings(state: FleetState, settings: FleetSettings) -> FleetState:
    """Return the state under other settings, in which no job runs."""
    free = (None,) * settings.devices
    return replace(state, settings=settings, busy=free, last=free)
