"""`Fleet`: many jobs at once, on few devices, each with the bits that it would have alone.

    job's event --> journal --> decide (pure) --> commands --> the devices' hosts
    fit: this loop, in the caller's thread, until every job has ended

The loop decides and never trains. One device has one process: its jobs' threads are in the caller's
process if there is one device, and in a spawned process for each of several.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any, Literal

import torch

from trainers.dice import Dice
from trainers.fleet.deciding.decide import decide
from trainers.fleet.deciding.events import (
    Added,
    Command,
    DeviceEnded,
    Event,
    Finished,
    Leave,
    Planned,
    Restarted,
    StopAsked,
    Turn,
    TurnEnded,
)
from trainers.fleet.deciding.fleet_error import FleetError
from trainers.fleet.deciding.fleet_state import FleetSettings, FleetState, JobState
from trainers.fleet.deciding.prediction import explained
from trainers.fleet.deciding.stop_rule import StopRule
from trainers.fleet.device_names import Devices
from trainers.fleet.early_end import early_end
from trainers.fleet.fleet_options import FleetOptions, Isolation, wrong_name
from trainers.fleet.hosting.device_host import DeviceHost, HostedJob
from trainers.fleet.hosting.device_process import DeviceProcess, pickled
from trainers.fleet.hosting.input_process import InputProcess, reads_for_all
from trainers.fleet.jobs.job_program import JobProgram
from trainers.fleet.jobs.lightning_job import LightningJob, Module, give_final_weights
from trainers.fleet.jobs.sharing_check import check_apart
from trainers.fleet.keeping.fleet_result import FleetResult, JobResult, said_left
from trainers.fleet.keeping.journal import Journal

Watch = Callable[[FleetState, Event], None]
OnEnd = Callable[[JobResult, Mapping[int, float]], None]


class Fleet:
    """Add jobs, then call `fit`. A folder with a journal is gone on with.

        fleet = Fleet(stop=Halving("train_loss", first=2), folder=folder)
        for lr in (0.1, 0.01, 0.001):
            fleet.add(f"lr={lr}", partial(Net, lr), train=loader, trainer={"max_epochs": 2}, seed=0)
        result = fleet.fit()
        print(result.best)

    explain() says what it would take, add() and stop() may be called while it runs, and the same
    program goes on after Ctrl-C or kill -9. A job's bits are those that it would have alone.
    """

    def __init__(
        self,
        budget: str | int | None = None,
        devices: Devices = "auto",
        *,
        host_budget: str | int | None = None,
        stop: StopRule | None = None,
        metric: str | None = None,
        mode: Literal["min", "max"] = "min",
        quantum: int | None = None,
        folder: str | Path = "runs/fleet",
        isolation: Isolation | None = None,
        checkpoint_minutes: float = 10.0,
        hours: float | None = None,
        watch: Watch | None = None,
    ) -> None:
        """`budget`: what a step of any job may take of its device. `host_budget`: what all jobs
        together may take of the host's memory; None: all that is left when `fit` begins. `metric`,
        `mode`: what is best; a stop rule has its own. `quantum`: the steps of a turn; None: from
        measured seconds. `isolation`: where jobs run; None: in threads of this process if there is
        one device, and in a process for each of several. `hours`: `fit` ends after so long with
        what is best by then, and the same program goes on for as long again. `watch` is called
        after every decision."""
        self._options = FleetOptions.of(
            budget, devices, host_budget, stop, metric, mode, quantum, folder, isolation,
            checkpoint_minutes, hours,
        )  # fmt: skip
        self.folder = self._options.folder
        self.metric = self._options.metric
        self.mode = self._options.mode
        self.devices = self._options.devices
        self._in_processes = self._options.isolation == "process"
        self._watch = watch
        self._programs: dict[str, JobProgram] = {}
        """As they were given."""
        self._priorities: dict[str, int] = {}
        self._jobs: dict[str, HostedJob] = {}
        """As the devices get them."""
        self._waiting: list[str] = []
        """Jobs that were added before the fleet began."""
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._hosts: list[Host] = []
        self._reader: InputProcess | None = None
        """What reads for several devices."""
        self._state: FleetState | None = None
        self._held_back: list[Turn] = []
        """Turns that wait for `fit`, because only plans were asked for."""
        self._plans: dict[str, Planned] = {}
        """What each job said when it was planned first."""
        self._history: dict[str, dict[int, float]] = {}
        self._journal = Journal(self.folder)
        self._base: Dice | None = None
        """The dice of this process when the fleet began."""
        self._resources = ExitStack()
        self._adding = threading.Lock()
        """Held while a job is added, and where the fleet begins and ends. So no job is lost."""
        self._ended = False
        self._told_end: list[OnEnd] = []
        """Who is told of jobs that have ended."""

    def __repr__(self) -> str:
        options, devices = self._options, ", ".join(map(str, self.devices))
        return (
            f"Fleet({len(self._jobs)} jobs on {devices}, budget={options.budget!r},"
            f" stop={options.stop!r}, metric={self.metric!r}, folder={str(self.folder)!r})"
        )

    # ---- jobs ------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        module: Module,
        *,
        train: Any,
        val: Any = None,
        trainer: Mapping[str, Any] | None = None,
        offload: Mapping[str, Any] | Literal[False] | None = None,
        seed: int | None = None,
        reserve: str | int | None = None,
        priority: int = 0,
    ) -> None:
        """Add a job, before `fit` or while it runs, from any thread.

        `module`, `train` and `val` may be functions of no arguments, which are called in the job's
        own turn. `trainer`: arguments of its Trainer. `offload`: options of its `OffloadStrategy`;
        False trains it with plain Lightning, and `reserve` says what that takes of the device.
        `seed`: as `seed_everything` at its beginning; None: it begins with the dice as they lie
        now. Jobs of a lower `priority` train only where none of a higher one can: a long step of
        theirs stands aside in its middle."""
        self._check_open(name)
        program = LightningJob.of(
            name, module, train, val, trainer or {}, offload, seed, reserve, self.devices[0]
        )
        if self._state is not None and not self._in_processes and not program.makes_all:
            raise FleetError(
                f"job {name} was added while the fleet runs, and its module was made outside of"
                " its turn: that drew random numbers of the job that has the turn. Give a function"
                " that makes it (module=lambda: Net())"
            )
        self.add_program(name, program, priority)

    def add_program(self, name: str, program: JobProgram, priority: int = 0) -> None:
        """Add a job that makes its Trainer itself. It may be called from any thread."""
        if wrong := wrong_name(name):
            raise FleetError(f"{name!r} cannot be the name of a job: {wrong}")
        with self._adding:
            self._check_open(name)
            if name in self._jobs:
                raise FleetError(f"there are two jobs of the name {name!r}: give each its own")
            check_apart(name, program, self._programs)
            dice = self._base or self._options.dice()
            job = HostedJob(program, self.folder / "jobs" / name, dice, priority)
            hosted = pickled(name, job) if self._in_processes else job
            self._programs[name] = program
            self._priorities[name] = priority
            self._jobs[name] = hosted
            if self._state is None:
                self._waiting.append(name)
            else:
                self._events.put(Added(name, priority))

    def _check_open(self, name: str) -> None:
        if self._ended:
            raise FleetError(f"job {name} was added after fit() had ended: make another Fleet")

    def stop(self, name: str) -> None:
        """End a job early; its weights are kept. It may be called from any thread, and again."""
        if name not in self._jobs:
            raise FleetError(f"there is no job {name!r}: the jobs are {', '.join(self._jobs)}")
        job = self._state.jobs.get(name) if self._state is not None else None
        if job is not None and (job.ended or job.ending in ("stopped", "failed")):
            return  # a `watch` that asks at every event would never see the last one
        self._events.put(StopAsked(name, "stop() was called"))

    def on_end(self, call: OnEnd) -> None:
        """Call `call(result, seen)` in the thread of `fit` for each job that has finished, was
        stopped or has failed. `seen`: its metric at each rung. The call may add jobs. When a folder
        is gone on with, it is first called for the jobs that ended before, in the same order."""
        self._told_end.append(call)

    # ---- the run ---------------------------------------------------------------------------------

    def explain(self) -> str:
        """Plan the jobs, and predict the whole run."""
        plans = self.plan()
        assert self._state is not None
        return explained(plans, self._state.settings)

    def plan(self) -> list[Planned]:
        """Build and plan every job for which there is memory. Return what they would take."""
        with self._begun():
            self._run(self._only_turns_left, hold_turns=True)
        assert self._state is not None
        return [self._plans[name] for name in self._state.jobs if name in self._plans]

    def fit(self) -> FleetResult:
        """Run all jobs to their ends, or until the time is over. Ctrl-C and the end of the time let
        every job write a checkpoint first."""
        if self._ended:
            raise FleetError("fit() has ended: make another Fleet")
        with self._begun():
            with early_end(self._events.put, self._options.seconds) as asked:
                held, self._held_back = self._held_back, []
                for turn in held:
                    self._do(turn)
                assert self._state is not None
                self._run(self._all_is_done)
            if asked and (left := self.result().unfinished):
                raise KeyboardInterrupt(f"{said_left(left, self.folder)}: the same program goes on")
        self.close()
        with ExitStack() as last:  # All others get theirs before one that is refused is told.
            for name, program in self._programs.items():
                if self._state.jobs[name].phase == "finished":
                    last.callback(give_final_weights, program, self._jobs[name].folder)
        return self.result()

    def result(self) -> FleetResult:
        """Return what is known of every job now."""
        states = self._state.jobs if self._state is not None else {}
        return FleetResult(
            MappingProxyType({name: self._job_result(job) for name, job in states.items()}),
            MappingProxyType({name: dict(seen) for name, seen in self._history.items()}),
            self.metric,
            self._options.mode,
        )

    def _job_result(self, job: JobState) -> JobResult:
        return JobResult(
            job.name, job.phase, job.step, job.metric, job.seconds, job.why, job.details,
            self.folder / "jobs" / job.name,
        )  # fmt: skip

    def close(self) -> None:
        """End all threads and processes. It may be called again."""
        if not self._ended and self._held_back:
            self._let_go()
        self._ended = True
        self._resources.close()
        self._journal.close()
        if self._base is not None and not self._in_processes:
            self._base.roll(self.devices[0])

    def _let_go(self) -> None:
        """End the jobs that were only planned. None has run a step that would have to be kept."""
        assert self._state is not None
        for name, job in self._state.jobs.items():
            if job.device is not None and not job.ended:
                self._hosts[job.device].do(Leave(name, job.device, "interrupted"), self._jobs[name])
                self._events.get()
        self._held_back = []

    # ---- the loop --------------------------------------------------------------------------------

    @contextmanager
    def _begun(self) -> Iterator[None]:
        """Begin the run if it has not begun, and end everything if this block fails."""
        try:
            if self._state is None:
                self._begin()
            yield
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        if not self._waiting:
            raise FleetError("the fleet has no jobs: call add() first")
        settings = self._options.settings()
        past = self._journal.open(self._options.identity())
        self._base = self._options.dice()
        if reads_for_all(self._in_processes, len(self.devices)):
            self._reader = self._resources.enter_context(InputProcess())
        for number, device in enumerate(self.devices):
            self._hosts.append(self._new_host(number, device))
        state = FleetState.of(settings)
        for event in past:  # there is no state yet, so jobs that are added here wait below
            if isinstance(event, FleetSettings):
                state = _with_settings(state, replace(event, rule=settings.rule))
                continue
            try:
                state, _ = decide(before := state, event)
            except Exception as error:  # whatever comes of events that nobody can have written
                raise FleetError(
                    f"{self._journal.path} is damaged ({event} cannot come there: {error!r}):"
                    " delete the folder to begin anew"
                ) from error
            self._note(event)
            self._tell_ends(before, state)
        unknown = set(state.jobs) - set(self._jobs)
        if unknown:
            raise FleetError(
                f"{self._journal.path} has jobs that were not added: {', '.join(sorted(unknown))}."
                " Add them, or give another folder"
            )
        with self._adding:  # later ones come as events
            self._state, waiting = _with_settings(state, settings), tuple(self._waiting)
        self._journal.begin(settings)
        if past:
            self._take(Restarted(), hold_turns=True)
        for name in waiting:
            if name not in self._state.jobs:
                self._take(Added(name, self._priorities[name]), hold_turns=True)

    def _new_host(self, number: int, device: torch.device) -> "Host":
        kind = DeviceProcess if self._in_processes else DeviceHost
        settings = self._options.seat(number, device)
        if self._reader is not None:
            settings = replace(settings, inputs=self._reader.address)
        return self._resources.enter_context(kind(settings, self._events.put))

    def _run(self, until: Callable[[], bool], hold_turns: bool = False) -> None:
        while not until():
            self._take(self._events.get(), hold_turns)

    def _take(self, event: Event, hold_turns: bool) -> None:
        """Write an event down, decide, and carry the decision out."""
        assert self._state is not None
        self._journal.write(event)
        if isinstance(event, DeviceEnded):
            self._hosts[event.device] = self._new_host(event.device, self.devices[event.device])
        self._state, commands = decide(before := self._state, event)
        self._note(event)
        for command in commands:
            if hold_turns and isinstance(command, Turn):
                self._held_back.append(command)
            else:
                self._do(command)
        self._tell_ends(before, self._state)
        if self._watch is not None:
            self._watch(self._state, event)

    def _do(self, command: Command) -> None:
        self._hosts[command.device].do(command, self._jobs[command.job])

    def _note(self, event: Event) -> None:
        if isinstance(event, Planned):
            self._plans.setdefault(event.job, event)
        if isinstance(event, Planned | TurnEnded | Finished) and event.metric is not None:
            self._history.setdefault(event.job, {})[event.step] = event.metric

    def _tell_ends(self, before: FleetState, after: FleetState) -> None:
        for name, job in after.jobs.items():
            if self._told_end and job.ended and not before.jobs[name].ended:
                for call in self._told_end:
                    call(self._job_result(job), job.values)

    def _all_is_done(self) -> bool:
        """Whether nothing is left to do. From then on no job can be added."""
        assert self._state is not None
        with self._adding:
            self._ended = self._state.over and self._events.empty()
        return self._ended

    def _only_turns_left(self) -> bool:
        """Whether every device that has something to do has been told to run a turn."""
        assert self._state is not None
        busy = sum(command is not None for command in self._state.busy)
        return self._events.empty() and busy == len(self._held_back)


Host = DeviceHost | DeviceProcess


def _with_settings(state: FleetState, settings: FleetSettings) -> FleetState:
    """Return the state under other settings, as another process finds it: no job runs."""
    free = (None,) * settings.devices
    return replace(state, settings=settings, busy=free, last=free)
