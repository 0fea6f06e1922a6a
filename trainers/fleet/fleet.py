"""`Fleet`: many jobs at once, on few devices, each with the bits that it would have alone."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

from trainers.fleet.deciding.events import FleetError, Planned, StopAsked
from trainers.fleet.deciding.halving import StopRule
from trainers.fleet.deciding.prediction import explain_run
from trainers.fleet.fleet_options import (
    Devices,
    FleetJobs,
    FleetOptions,
    Isolation,
    check_name,
    check_stop_rule,
    checked_hours,
    find_devices,
    parse_job_devices,
)
from trainers.fleet.fleet_run import FleetRun, OnEnd, Watch
from trainers.fleet.jobs.lightning_job import LightningJob, Module
from trainers.fleet.jobs.seat import JobProgram
from trainers.fleet.keeping.fleet_result import FleetResult, describe_unfinished
from trainers.random_state import RandomState


class Fleet:
    """Add jobs, then call `fit`. A folder with a journal is resumed.

        fleet = Fleet(stop=Halving("train_loss", first=2), folder=folder)
        for lr in (0.1, 0.01, 0.001):
            fleet.add(f"lr={lr}", partial(Net, lr), train=loader, trainer={"max_epochs": 2}, seed=0)
        result = fleet.fit()
        print(result.best)

    explain() predicts the run, add() and stop() may be called while it runs, and the same program
    resumes after Ctrl-C or kill -9. A job's bits are those that it would have alone.
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
        migrate: bool = True,
        watch: Watch | None = None,
    ) -> None:
        """`budget`: what a step of any job may take of its device. `host_budget`: what all jobs
        together may take of the host's memory; None: all that is left when `fit` begins. `metric`,
        `mode`: what is best; a stop rule has its own. `quantum`: the steps of a turn; None: from
        measured seconds. `isolation`: where jobs run; None: in threads of this process if there is
        one device, and in a process for each of several. `hours`: `fit` ends after this time with
        what is best by then, and the same program goes on for as long again. `migrate`: jobs that
        may have more devices than they have move onto those that fall free, if that is predicted to
        be worth it. `watch` is called after every decision."""
        check_stop_rule(stop)
        self.devices = find_devices(devices)
        self.folder = Path(folder)
        self.metric = stop.metric if stop is not None else metric
        self.mode: Literal["min", "max"] = getattr(stop, "mode", mode)
        self._options = FleetOptions(
            devices=self.devices,
            isolation=isolation or ("process" if len(self.devices) > 1 else "thread"),
            budget=budget,
            host_budget=host_budget,
            stop=stop,
            metric=self.metric,
            mode=self.mode,
            quantum=quantum,
            folder=self.folder,
            checkpoint_seconds=60 * checkpoint_minutes,
            seconds=None if hours is None else checked_hours(hours),
            migrate=migrate,
        )
        self._jobs = FleetJobs(self._options)
        self._run = FleetRun(self._options, self._jobs, watch)
        self._random_state: RandomState | None = None
        self._adding = threading.Lock()
        """Held while a job is added, and where the fleet begins and ends, so that no job is
        lost."""
        self._ended = False

    def __repr__(self) -> str:
        options, devices = self._options, ", ".join(map(str, self.devices))
        return (
            f"Fleet({len(self._jobs.hosted)} jobs on {devices}, budget={options.budget!r},"
            f" stop={options.stop!r}, metric={self.metric!r}, folder={str(self.folder)!r})"
        )

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
        devices: int | str = 1,
    ) -> None:
        """Add a job, before `fit` or while it runs, from any thread.

        `module`, `train` and `val` may be functions of no arguments, which are called in the job's
        own turn. `trainer`: arguments of its Trainer. `offload`: options of its `OffloadStrategy`;
        False trains it with plain Lightning, and `reserve` says what that takes of the device.
        `devices`: on how many of the fleet's it trains at once: 2, or "1..4" for what is predicted
        to be worth it and free. `seed`: as `seed_everything` at its beginning; None: it begins with
        the random state of this process now. Jobs of a lower `priority` train only where none of a
        higher one can: a long step of theirs stands aside in its middle."""
        self._check_open(name)
        program = LightningJob(module, train, val, dict(trainer or {}), offload, seed, reserve)
        program.check(name, self.devices[0])
        if offload is False and str(devices) != "1":
            raise FleetError(
                f"job {name}: devices={devices!r} and offload=False: plain Lightning has one device"
                " here: leave one of them out"
            )
        running = self._run.state is not None
        if running and not self._options.in_processes and not program.makes_module:
            raise FleetError(
                f"job {name} was added while the fleet runs, and its module was made outside of"
                " its turn: that drew random numbers of the job that has the turn. Give a function"
                " that makes it (module=lambda: Net())"
            )
        self.add_program(name, program, priority, devices)

    def add_program(
        self, name: str, program: JobProgram, priority: int = 0, devices: int | str = 1
    ) -> None:
        """Add a job that makes its Trainer itself. It may be called from any thread."""
        check_name(name)
        asked = parse_job_devices(devices, self.devices, f"job {name}: devices={devices!r}")
        with self._adding:
            self._check_open(name)
            random_state = self._random_state or self._options.random_state()
            self._jobs.add(name, program, random_state, priority, asked)
            if self._run.state is not None:
                self._run.events.put(self._jobs.added(name))

    def _check_open(self, name: str) -> None:
        if self._ended:
            raise FleetError(f"job {name} was added after fit() had ended: make another Fleet")

    def stop(self, name: str) -> None:
        """End a job early; its weights are kept. It may be called from any thread, and again."""
        if name not in self._jobs.hosted:
            names = ", ".join(self._jobs.hosted)
            raise FleetError(f"there is no job {name!r}: the jobs are {names}")
        state = self._run.state
        job = state.jobs.get(name) if state is not None else None
        if job is not None and not job.alive:
            return  # a `watch` that stops a job at every event would never see the last one
        self._run.events.put(StopAsked(name, "stop() was called"))

    def on_end(self, call: OnEnd) -> None:
        """Call `call(result, seen)` in the thread of `fit` for each job that has finished, was
        stopped or has failed. `seen`: its metric at each rung. The call may add jobs. If the folder
        is resumed, it is first called for the jobs that ended before, in the same order."""
        self._run.on_end.append(call)

    def explain(self) -> str:
        """Plan the jobs, and predict the whole run."""
        plans = self.plan()
        assert self._run.state is not None
        return explain_run(plans, self._run.state.settings)

    def plan(self) -> list[Planned]:
        """Build and plan every job for which there is memory. Return their plans."""
        with self._begun():
            self._run.plan()
        assert self._run.state is not None
        plans = self._run.reports.plans
        return [plans[name] for name in self._run.state.jobs if name in plans]

    def fit(self) -> FleetResult:
        """Run all jobs until they or the time end. Ctrl-C lets them write checkpoints first."""
        if self._ended:
            raise FleetError("fit() has ended: make another Fleet")
        with self._begun():
            is_interrupted = self._run.train(self._is_done)
            if is_interrupted and (left := self.result().unfinished):
                where = describe_unfinished(left, self.folder)
                raise KeyboardInterrupt(f"{where}: the same program goes on")
        self.close()
        result = self.result()
        with ExitStack() as last:  # if one job's weights are refused, all others get theirs first
            for name, job in result.jobs.items():
                if job.state == "finished":
                    last.callback(self._jobs.give_final_weights, name)
        return result

    def result(self) -> FleetResult:
        """Return what is known of every job now."""
        return self._run.result()

    def close(self) -> None:
        """End all threads and processes. It may be called again."""
        is_first, self._ended = not self._ended, True
        self._run.close(is_first)
        if self._random_state is not None and not self._options.in_processes:
            self._random_state.restore(self.devices[0])

    @contextmanager
    def _begun(self) -> Iterator[None]:
        """Begin the run if it has not begun, and end everything if this block fails."""
        try:
            if self._run.state is None:
                if not self._jobs.hosted:
                    raise FleetError("the fleet has no jobs: call add() first")
                self._random_state = self._options.random_state()
                self._run.begin(self._adding)
            yield
        except BaseException:
            self.close()
            raise

    def _is_done(self) -> bool:
        """Whether nothing is left to do. From then on no job can be added."""
        state = self._run.state
        assert state is not None
        with self._adding:
            self._ended = state.is_done and self._run.events.empty()
        return self._ended
