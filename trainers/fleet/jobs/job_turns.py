"""When a job's thread runs: it reports its plan, trains in its turns, and hands over after each.

A turn ends between two steps. It ends earlier
    when only the host still works on its last step, if the turn is shared (`on_tail`)
    in the middle of a step, for a job of higher priority (`stand_aside`, job_thread.py)
    between two batches, if the input has to wait for other jobs (`wait_for_jobs`)
"""

import math
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn
from weakref import WeakSet

import lightning as L

from loaders.stats import LoaderStats
from offload import Plan, Runner
from offload.memory.host_needs import swap_seconds
from offload.sizes import format_size
from trainers.atomic_checkpoint import written
from trainers.fleet.deciding.events import (
    Event,
    FleetError,
    JobMemory,
    Leave,
    Planned,
    StepTimes,
    Turn,
    TurnEnded,
)
from trainers.fleet.inputs.shared_inputs import SharedInputs
from trainers.fleet.jobs.tenancy import Baton, Grant, SeatSettings, Tenancy
from trainers.lightning_seams import combined_loader
from trainers.steps.target import Target

VALIDATION_COST = 1 / 3
"""A validation batch is a forward pass. It counts as this part of a training step."""


class JobProgress:
    """The progress of one job, before it has a Trainer, too."""

    def __init__(self, job: str, metric_name: str | None) -> None:
        self.trainer: L.Trainer | None = None
        self.checkpoint_metric: float | None = None
        """The watched metric in the checkpoint from which the job resumed."""
        self.has_stepped = False
        self.job = job
        self._metric_name = metric_name
        self._has_trained = False
        """Whether training is over. A test that follows may log other values."""
        self._final_metric: float | None = None

    @property
    def step(self) -> int:
        """The optimizer steps that the job has done."""
        return self.trainer.global_step if self.trainer is not None else 0

    @property
    def metric(self) -> float | None:
        """The watched metric as training logged it last; None if it was never logged."""
        if self._has_trained:
            return self._final_metric
        if self.trainer is None or self._metric_name is None:
            return None
        value = self.trainer.callback_metrics.get(self._metric_name)
        return self.checkpoint_metric if value is None else float(value)

    @property
    def logged_names(self) -> str:
        """The names of all values that the job has logged."""
        return ", ".join(sorted(self.trainer.callback_metrics)) if self.trainer else ""

    def end_training(self) -> None:
        """Keep the metric with which training ended."""
        self._final_metric, self._has_trained = self.metric, True

    def steps_left(self, done: int) -> int:
        """Return the number of optimizer steps after `done`."""
        assert self.trainer is not None
        total = self.trainer.estimated_stepping_batches
        if total < 0 or math.isinf(total):
            raise FleetError(
                f"job {self.job} has no end: give its Trainer max_epochs or max_steps, so that the"
                " fleet can share its devices"
            )
        return max(0, int(total) - done)

    def validation_seconds(self, left: int, step_seconds: float) -> float:
        """Predict the seconds of the validations during the `left` next steps."""
        trainer = self.trainer
        assert trainer is not None
        batches, every = left * trainer.accumulate_grad_batches, trainer.val_check_batch
        each = sum(trainer.num_val_batches)
        if not every or not math.isfinite(every) or not math.isfinite(each):
            return 0.0
        rounds = batches / every / (trainer.check_val_every_n_epoch or 1)
        return rounds * each * step_seconds * VALIDATION_COST

    def loader_bytes(self) -> int:
        """Return the bytes of the buffers and caches of the train loaders that report them."""
        assert self.trainer is not None
        loaders = combined_loader(self.trainer)
        reported = [getattr(part, "stats", None) for part in (loaders.flattened if loaders else ())]
        stats = [each for each in reported if isinstance(each, LoaderStats)]
        return sum(each.buffer_bytes + each.batch_bytes + each.cache_bytes for each in stats)


LAST, FINAL = "last.ckpt", "final.ckpt"
STOPPED = "stopped.ckpt"


class JobLeft(Exception):
    """A job's program raises this when it leaves its device and can resume from its checkpoint."""

    def __init__(self, step: int) -> None:
        """`step`: that of its checkpoint, or of its last weights if it will not resume."""
        super().__init__(f"the job left its device after step {step}")
        self.step = step


def leave_for_good(name: str, folder: Path, trainer: L.Trainer) -> NoReturn:
    """Write the weights of a job that was stopped early, and leave."""
    if not written(trainer, path := folder / STOPPED, weights_only=True):
        raise FleetError(
            f"job {name} was stopped at step {trainer.global_step}, and {path} could not be"
            " written: see the error above, and free some space"
        )
    raise JobLeft(trainer.global_step)


@dataclass(slots=True)
class TurnClock:
    """When a turn began."""

    began: float = 0.0
    step_began: float = 0.0
    """When the current step began, or what comes before it."""
    first_step: int = 0
    """The steps that the job had done when the turn began."""
    swapped: float = 0.0
    """The seconds of all changes of tenants when the turn began."""


class JobTurns:
    """One job's. Only the job's thread calls it, and its bystander while a step stands aside."""

    def __init__(
        self,
        settings: SeatSettings,
        tenancy: Tenancy,
        baton: Baton,
        progress: JobProgress,
        inputs: SharedInputs,
    ) -> None:
        self.baton = baton
        self.progress = progress
        self.ends_early = False
        """Whether the turn ends after its current step. Any thread may set it."""
        self.seconds_by_devices: Callable[[], tuple[float, ...]] | None = None
        """Predicts a step on 1, 2, .. devices; None: the job may not have several."""
        self._device, self._devices = settings.number, settings.devices
        self._tenancy = tenancy
        self._inputs = inputs
        self._grant: Grant | None = None
        """What was granted last. It stays after the hand-over, unlike `baton.grant`."""
        self._clock = TurnClock()
        self._planned = False
        self._runners: WeakSet[Runner] = WeakSet()
        self._passed_on = False
        """Whether the device was passed on before the end of the current step."""
        self._metric_before: float | None = None
        """The metric before the last step of a shared turn."""

    def seconds(self) -> float:
        """Return the seconds since the last grant."""
        return time.monotonic() - self._clock.began

    def begin(self) -> None:
        """Wait for the grant to start."""
        self._wait()

    def begin_step(self, memory: Callable[[], JobMemory | None]) -> None:
        """Hand over if the turn is over. `memory`: what a job without a plan needs, else None."""
        self._check_step_error()
        self._clock.step_began = time.monotonic()
        if not self._planned and (needed := memory()) is not None:
            self._report(needed, "plain Lightning, without a plan")
        if self.turn_is_over:
            self._hand_over(self._turn_ended())
        if self._shares_next_step():
            self._metric_before = self.progress.metric

    def end_batch(self, memory: Callable[[], JobMemory | None]) -> None:
        """Note that a batch has run. `memory`: the needs of the job if it has no plan; None if its
        step goes on in the next batch."""
        self.progress.has_stepped = True
        if not self._planned and (needed := memory()) is not None:
            self._report(needed, "trains eagerly, without a plan")

    def end_training(self) -> None:
        self._check_step_error()
        self.progress.end_training()

    def wait_for_jobs(self, jobs: tuple[str, ...]) -> bool:
        """End the turn until these jobs had theirs. False: there is no turn to be ended."""
        if self.progress.trainer is None or not isinstance(self._grant, Turn):
            return False
        self._hand_over(replace(self._turn_ended(), waits_for=jobs))
        if not isinstance(self._grant, Turn):
            return False
        self._inputs.rest(self._grant.without)
        return True

    @property
    def turn_is_over(self) -> bool:
        """Whether all steps of the turn are done, or it ends early."""
        turn = self._grant
        return isinstance(turn, Turn) and (self.ends_early or self._steps_left(turn) <= 0)

    def _steps_left(self, turn: Turn) -> int:
        return turn.steps - (self.progress.step - self._clock.first_step)

    def _check_step_error(self) -> None:
        if (error := self.baton.step_error) is not None:
            raise FleetError(
                f"a step of job {self.progress.job} stood aside for another job and could not"
                f" resume ({error}), so its weights are lost: begin the job again from its last"
                " checkpoint"
            ) from error

    def on_tail(self) -> None:
        """Pass the device on if only host nodes of the turn's last step are left."""
        if self._shares_next_step():
            self._passed_on = True
            self.baton.hand_over(self._turn_ended(unfinished=1))

    def tail_over(self) -> None:
        """Wait for the next turn if the device was passed on in this step."""
        if self._passed_on:
            self._passed_on = False
            self.baton.tidy()
            self._wait(unfinished=1)

    def _shares_next_step(self) -> bool:
        turn = self._grant
        return isinstance(turn, Turn) and turn.share and self._steps_left(turn) <= 1

    def _watch_tails(self) -> None:
        """Let the runners call `on_tail` in the steps of a shared turn."""
        shares = isinstance(self._grant, Turn) and self._grant.share
        for runner in self._runners:
            runner.tails = self if shares else None

    def stand_aside(self, clear_arena: Callable[[], object]) -> None:
        """Hand over, and return with the next grant. The bystander calls it while the job's thread
        waits in the middle of a step. `clear_arena` is called when the next job has begun, which
        builds and plans meanwhile."""
        clock = self._clock
        swapped = self._tenancy.swapped_seconds - clock.swapped
        whole = max(0.0, clock.step_began - clock.began)
        in_step = time.monotonic() - max(clock.began, clock.step_began)
        done = self.progress.step
        event = TurnEnded(
            self.progress.job, self._device, done, done - clock.first_step, 0,
            max(0.0, whole - swapped) if whole else 0.0, swapped, None, aside=True,
        )  # fmt: skip
        self.baton.stands_aside = True
        self.baton.hand_over(event)
        with suppress(Exception):  # no other job gets the arena then, and each reports the reason
            clear_arena()
        grant = self.baton.wait(self.progress.trainer, keep_end=True)
        self.baton.stands_aside = False
        self._begin_grant(grant or self._grant)  # the fleet has ended: the turn ends after the step
        self._clock.began -= in_step if whole else in_step - swapped

    def make_runner(self, plan: Plan, key: Hashable, target: Target) -> Runner:
        """Return a runner on the device's stage, as soon as there is memory for it."""
        trainer = self.progress.trainer
        if not self._planned and trainer is not None and trainer.training:
            memory = self._tenancy.memory(plan)
            more = self.progress.loader_bytes() + self._inputs.room(self.progress.job)
            memory = replace(memory, host_bytes=memory.host_bytes + more)
            tail = self._tenancy.tail_seconds(plan)
            times = StepTimes(plan.predicted_seconds, tail, swap_seconds(plan))
            device, host = format_size(plan.device_bytes), format_size(plan.host_bytes)
            about = f"{device} of the device, {host} of the host, {plan.predicted_seconds:.3g} s"
            by_devices = () if self.seconds_by_devices is None else self.seconds_by_devices()
            self._report(memory, f"{about} a step", times, by_devices)
        runner = self._tenancy.runner(plan, key, target)
        self._runners.add(runner)
        self._watch_tails()
        return runner

    def _report(
        self,
        memory: JobMemory,
        about: str,
        times: StepTimes | None = None,
        by_devices: tuple[float, ...] = (),
    ) -> None:
        """Report what the job needs, and wait until it may take that."""
        self._planned = True
        progress, times = self.progress, times or StepTimes()
        left = progress.steps_left(progress.step)
        event = Planned(
            progress.job, self._device, progress.step, left, times, memory, about, self.seconds(),
            progress.validation_seconds(left, times.step_seconds),
            progress.metric if progress.has_stepped else progress.checkpoint_metric,
            self._inputs.label(self.progress.job), self._devices, by_devices,
        )  # fmt: skip
        self._hand_over(event)

    def _turn_ended(self, unfinished: int = 0) -> TurnEnded:
        """`unfinished`: 1 if a step's host tail still runs. Not counted is what it logs."""
        done = self.progress.step + unfinished
        metric = self._metric_before if unfinished else self.progress.metric
        swapped = self._tenancy.swapped_seconds - self._clock.swapped
        return TurnEnded(
            job=self.progress.job,
            device=self._device,
            step=done,
            steps=done - self._clock.first_step,
            left=self.progress.steps_left(done),
            seconds=max(0.0, self.seconds() - swapped),
            swap_seconds=swapped,
            metric=metric,
            instead=self.progress.logged_names if metric is None else "",
            input=self._inputs.label(self.progress.job),
        )

    def _hand_over(self, event: Event) -> None:
        self.baton.tidy()
        self.baton.hand_over(event)
        self._wait()

    def _wait(self, unfinished: int = 0) -> None:
        """Wait for a grant. `unfinished`: 1 if a step of an earlier turn was not counted yet."""
        grant = self.baton.wait(self.progress.trainer)
        if grant is None:
            raise JobLeft(self.progress.step)  # the fleet has ended and wants no checkpoint
        self._begin_grant(grant, unfinished)
        if isinstance(grant, Leave) and not self.progress.has_stepped:
            raise JobLeft(self.progress.step)  # its checkpoint is where it is, or its beginning

    def _begin_grant(self, grant: Grant | None, unfinished: int = 0) -> None:
        now, step = time.monotonic(), self.progress.step + unfinished
        self._clock = TurnClock(now, now, step, self._tenancy.swapped_seconds)
        self._grant = grant
        self._watch_tails()
