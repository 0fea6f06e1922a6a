"""When a job's thread runs: it reports its plan, trains in its turns, and hands over after each.

A turn ends between two steps. It ends earlier
    when only the host still works on its last step, if the turn is shared (`on_tail`)
    in the middle of a step, for a job of higher priority (`stand_aside`, bystander.py)
    between two batches, if the input has to wait for other jobs (`wait_for_jobs`)
"""

import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, replace
from weakref import WeakSet

from offload import Plan, Runner
from offload.memory.host_needs import swap_seconds
from offload.sizes import format_size
from trainers.fleet.deciding.events import (
    Event,
    JobMemory,
    Leave,
    Planned,
    StepTimes,
    Turn,
    TurnEnded,
)
from trainers.fleet.deciding.fleet_error import FleetError
from trainers.fleet.inputs.shared_inputs import SharedInputs
from trainers.fleet.jobs.baton import Baton, Grant
from trainers.fleet.jobs.job_progress import JobProgress
from trainers.fleet.jobs.leaving import JobLeft
from trainers.fleet.jobs.seat_settings import SeatSettings
from trainers.fleet.jobs.tenancy import Tenancy
from trainers.steps.target import Target


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

    def seconds(self) -> float:
        return time.monotonic() - self.began


class JobTurns:
    """One job's. Only the job's thread calls it, and its bystander while a step stands aside."""

    def __init__(
        self,
        job: str,
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
        self._job = job
        self._device = settings.number
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
        return self._clock.seconds()

    def begin(self) -> None:
        """Wait for the grant to start."""
        self._wait()

    # ---- between steps ---------------------------------------------------------------------------

    def begin_step(self, memory: Callable[[], JobMemory | None]) -> None:
        """Hand over if the turn is over. `memory`: the needs of a job without a plan; None if the
        job will have a plan in this step."""
        self._check_step_error()
        self._clock.step_began = time.monotonic()
        if not self._planned and (needed := memory()) is not None:
            self._report(needed, "plain Lightning, without a plan")
        if self.turn_is_over:
            self._hand_over(self._turn_ended())
        if self._shares_next_step():
            self._metric_before = self.progress.metric

    def end_batch(self, memory: Callable[[], JobMemory]) -> None:
        """Note that a batch has run. `memory`: the needs of the job if it has no plan."""
        self.progress.has_stepped = True
        if not self._planned:
            self._report(memory(), "trains eagerly, without a plan")

    def end_training(self) -> None:
        self._check_step_error()
        self.progress.end_training()

    def wait_for_jobs(self, jobs: tuple[str, ...]) -> bool:
        """End the turn between two batches, until these jobs had their turns. False: the job has no
        turn that could end, or it has to leave."""
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
                f"a step of job {self._job} stood aside for another job and could not resume"
                f" ({error}), so its weights are lost: begin the job again from its last checkpoint"
            ) from error

    # ---- the host tail of a shared turn; the runner calls these ----------------------------------

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

    # ---- in the middle of a step -----------------------------------------------------------------

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
            self._job, self._device, done, done - clock.first_step, 0,
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

    # ---- the plan --------------------------------------------------------------------------------

    def make_runner(self, plan: Plan, key: Hashable, target: Target) -> Runner:
        """Return a runner on the device's stage, as soon as there is memory for it."""
        trainer = self.progress.trainer
        if not self._planned and trainer is not None and trainer.training:
            memory = self._tenancy.memory(plan)
            more = self.progress.loader_bytes() + self._inputs.room(self._job)
            memory = replace(memory, host_bytes=memory.host_bytes + more)
            tail = self._tenancy.tail_seconds(plan)
            times = StepTimes(plan.predicted_seconds, tail, swap_seconds(plan))
            self._report(memory, _plan_line(plan), times)
        runner = self._tenancy.runner(plan, key, target)
        self._runners.add(runner)
        self._watch_tails()
        return runner

    def _report(self, memory: JobMemory, about: str, times: StepTimes | None = None) -> None:
        """Report what the job needs, and wait until it may take that."""
        self._planned = True
        progress, times = self.progress, times or StepTimes()
        left = progress.steps_left(progress.step)
        event = Planned(
            self._job, self._device, progress.step, left, times, memory, about, self.seconds(),
            progress.validation_seconds(left, times.step_seconds),
            progress.metric if progress.has_stepped else progress.checkpoint_metric,
            self._inputs.label(self._job),
        )  # fmt: skip
        self._hand_over(event)

    # ---- handing over ----------------------------------------------------------------------------

    def _turn_ended(self, unfinished: int = 0) -> TurnEnded:
        """`unfinished`: 1 if the host tail of a step still runs. The step counts, but not what it
        logs."""
        done = self.progress.step + unfinished
        metric = self._metric_before if unfinished else self.progress.metric
        swapped = self._tenancy.swapped_seconds - self._clock.swapped
        return TurnEnded(
            job=self._job,
            device=self._device,
            step=done,
            steps=done - self._clock.first_step,
            left=self.progress.steps_left(done),
            seconds=max(0.0, self.seconds() - swapped),
            swap_seconds=swapped,
            metric=metric,
            instead=self.progress.logged_names if metric is None else "",
            input=self._inputs.label(self._job),
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


def _plan_line(plan: Plan) -> str:
    device, host = format_size(plan.device_bytes), format_size(plan.host_bytes)
    return f"{device} of the device, {host} of the host, {plan.predicted_seconds:.3g} s a step"
