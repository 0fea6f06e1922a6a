"""What a job sees of the fleet: its turn, its strategy, and whether it has to leave.

    job's thread   | record, plan ... wait | step step step | wait ........ | step step | wait
    the device          Start -> Planned        Turn -> TurnEnded                Turn -> ...

For a job of higher priority a turn may end in the middle of a step (bystander.py).

A job's thread runs only from a grant to its hand-over. Before it waits it keeps its dice, and it
rolls them when it goes on. Whoever holds the grant holds the baton: no other thread of this process
runs a job's code, records a step, or uses the device.
"""

import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import lightning as L

from offload import Plan, Runner
from offload.memory.host_needs import swap_seconds
from trainers.dice import Dice
from trainers.fleet.deciding.events import (
    Event,
    JobMemory,
    Leave,
    Planned,
    Start,
    Turn,
    TurnEnded,
)
from trainers.fleet.deciding.fleet_error import FleetError
from trainers.fleet.jobs.bystander import Bystander
from trainers.fleet.jobs.job_left import JobLeft
from trainers.fleet.jobs.job_loaders import put_behind
from trainers.fleet.jobs.job_needs import (
    loader_bytes,
    plan_line,
    steps_left,
    validation_seconds,
)
from trainers.fleet.jobs.job_strategy import JobStrategy
from trainers.fleet.jobs.seat_settings import SeatSettings
from trainers.fleet.jobs.tenancy import Tenancy
from trainers.steps.target import Target

if TYPE_CHECKING:
    from trainers.fleet.jobs.job_input import JobInput

Grant = Start | Turn | Leave
SETTLING = 3
"""After so many turns its steps, and its first validation, are recorded and planned, which leaves
most behind."""


class Seat:
    """One job's. The device's host fills `grants`; the job's thread calls everything else."""

    def __init__(
        self,
        name: str,
        folder: Path,
        settings: SeatSettings,
        tenancy: Tenancy,
        dice: Dice,
        send: Callable[[Event], None],
    ) -> None:
        self.name = name
        self.folder = folder
        self.device = settings.device
        self.budget = settings.budget
        self.callbacks: list[L.Callback] = []
        """They must be in the Trainer."""
        self.settings = settings
        self.reserve: int | None = None
        """What a job without a plan takes of its device, as its user says."""
        self.grants: SimpleQueue[Grant | None] = SimpleQueue()
        """None ends the job where it waits."""
        self.leave_asked = ""
        """Why the job has to leave now; empty if it has not."""
        self.earlier_metric: float | None = None
        """The watched metric in the checkpoint from which the job goes on."""
        self.fleet_ended = False
        """Whether the fleet has ended, so that this turn ends after its step. Set by any thread."""
        self.yields = False
        """Whether this turn ends after its step for a job of higher priority. Set by any thread."""
        self.input: JobInput | None = None
        """What the job reads. None: there is nobody to share it with."""
        self.waited = 0.0
        """The seconds that the job has waited for its turns."""
        self.granted: Grant | None = None
        """What the job was told to do last, from the moment of the grant to its answer."""
        self.stands_aside = False
        """Whether a step of it stands aside now."""
        self.spoilt: BaseException | None = None
        """What went wrong while a step stood aside. The step's values cannot be trusted then."""
        self._tenancy = tenancy
        self._dice = dice
        self._send = send
        self._trainer: L.Trainer | None = None
        self._planned = False
        self._trained = False
        """Whether training is over. A test that follows logs other metrics, or others' values."""
        self._last_metric: float | None = None
        self._metric_before: float | None = None
        """Before the last step of a turn that is shared."""
        self._has_stepped = False
        """Whether a batch has run since the job began or went on."""
        self._grant: Grant | None = None
        self._runners: WeakSet[Runner] = WeakSet()
        self._hand_overs = 0
        self._since = 0.0
        self._swapped = 0.0
        """The seconds of all changes of tenants when the turn began."""
        self._at_step = 0
        """The steps that the job had done when its turn began."""
        self._step_began = 0.0
        """When the step under way began, or what comes before it."""
        self._bystander: Bystander | None = None
        self._shared = False
        """Whether the device was passed on before the end of the step under way."""

    # ---- for a job's program ---------------------------------------------------------------------

    def strategy(self, **options: Any) -> JobStrategy:
        """Return an `OffloadStrategy` with these options, within the fleet's budget and on its
        device."""
        on_gpu = self.device.type == "cuda"  # a CPU is its own host: no tail is hidden there
        given = {"budget": self.budget, "plan_cache": self.settings.plans, **options}
        return JobStrategy(self._runner, on_gpu, **given)

    @property
    def on_device(self) -> dict[str, Any]:
        """The Trainer's arguments that name the fleet's device."""
        if self.device.type == "cpu":
            return {"accelerator": "cpu", "devices": 1}
        return {"accelerator": "gpu", "devices": [self.device.index or 0]}

    # ---- for the job's thread --------------------------------------------------------------------

    def begin(self) -> None:
        """Wait for the grant to start."""
        self._wait()

    def end(self) -> None:
        """Forget the Trainer and its module, because the job's program has returned."""
        if self.input is not None:
            self.input.leave()
        self._trainer = None
        self.callbacks.clear()  # Lightning lets each of them refer to the module

    @property
    def turn_seconds(self) -> float:
        """The seconds since the last grant."""
        return time.monotonic() - self._since

    @property
    def trainer(self) -> L.Trainer | None:
        """The Trainer of the job, once it has one."""
        return self._trainer

    @property
    def step(self) -> int:
        """The optimizer steps that the job has done."""
        return self._trainer.global_step if self._trainer is not None else 0

    @property
    def metric(self) -> float | None:
        """The watched metric as training logged it last; None if it never was."""
        if self._trained:
            return self._last_metric
        if self._trainer is None or self.settings.metric is None:
            return None
        value = self._trainer.callback_metrics.get(self.settings.metric)
        return self.earlier_metric if value is None else float(value)

    @property
    def logged(self) -> str:
        """The names of what the job has logged."""
        return ", ".join(sorted(self._trainer.callback_metrics)) if self._trainer else ""

    # ---- for the callback ------------------------------------------------------------------------

    def attach(self, trainer: L.Trainer) -> None:
        """Note the Trainer of the job."""
        self._trainer = trainer

    def between_steps(self, memory: Callable[[], JobMemory | None]) -> None:
        """Hand over if the turn is over. `memory`: what a job without a plan needs; None if the
        plan, which comes in this step, will say it."""
        self._check_spoilt()
        self._step_began = time.monotonic()
        if not self._planned and (needed := memory()) is not None:
            self._report(needed, "plain Lightning, without a plan")
        if self.turn_over:
            self._hand_over(self._turn_ended())
        if isinstance(turn := self._grant, Turn) and turn.share and self._left_of_turn(turn) <= 1:
            self._metric_before = self.metric

    def wait_for(self, jobs: tuple[str, ...]) -> Turn | None:
        """End the turn between two batches, until these jobs had theirs, and return the next turn.
        None: this is no turn, or the job has to leave."""
        trainer = self._trainer
        if trainer is None or not isinstance(self._grant, Turn):
            return None
        self._hand_over(replace(self._turn_ended(), waits_for=jobs))
        return self._grant if isinstance(self._grant, Turn) else None

    def batch_over(self, memory: Callable[[], JobMemory]) -> None:
        """Note that a batch has run. `memory`: what the job needs if it turns out to have no
        plan."""
        self._has_stepped = True
        if not self._planned:
            self._report(memory(), "trains eagerly, without a plan")

    def training_over(self) -> None:
        """Note the metric that training ends with."""
        self._check_spoilt()
        self._last_metric, self._trained = self.metric, True

    @property
    def turn_over(self) -> bool:
        """Whether all steps of the turn are done, or no more are wanted."""
        turn = self._grant
        ends = self.fleet_ended or self.yields
        return isinstance(turn, Turn) and (ends or self._left_of_turn(turn) <= 0)

    def _left_of_turn(self, turn: Turn) -> int:
        return turn.steps - (self.step - self._at_step)

    def on_tail(self) -> None:
        """Pass the device on if only host nodes of the turn's last step are left."""
        turn = self._grant
        if isinstance(turn, Turn) and turn.share and self._left_of_turn(turn) <= 1:
            self._shared = True
            self._dice = Dice.now(self.device)
            self._send(self._turn_ended(under_way=1))

    def tail_over(self) -> None:
        """Wait for the next turn if the device was passed on in this step."""
        if self._shared:
            self._shared = False
            self._tidy()
            self._wait(under_way=1)

    def _turn_ended(self, under_way: int = 0) -> TurnEnded:
        """`under_way`: a step whose host tail still runs. It counts, but for what it logs."""
        done, metric = self.step + under_way, self._metric_before if under_way else self.metric
        swapped = self._tenancy.swapped_seconds - self._swapped
        return TurnEnded(
            job=self.name,
            device=self.settings.number,
            step=done,
            steps=done - self._at_step,
            left=steps_left(self.name, self._trainer, done),
            seconds=max(0.0, self.turn_seconds - swapped),
            swap_seconds=swapped,
            metric=metric,
            instead=self.logged if metric is None else "",
            input=self.input.label if self.input else "",
        )

    # ---- in the middle of a step -----------------------------------------------------------------

    def ask_to_stand_aside(self) -> None:
        """Let the step under way stand aside between two of its nodes. The device's host calls it
        during a turn."""
        turn = self.granted
        asked = self._bystander is not None and self._bystander.turn is turn
        if isinstance(turn, Turn) and not asked:
            self._bystander = Bystander(self, turn, self._tenancy)

    def stand_aside(self, clear_arena: Callable[[], object]) -> None:
        """Hand over, and return with the next grant. The bystander calls it, and the job's thread
        waits for it in the middle of a step. `clear_arena` is called when the next job has begun:
        it builds and plans meanwhile."""
        now = time.monotonic()
        swapped = self._tenancy.swapped_seconds - self._swapped
        whole = max(0.0, self._step_began - self._since)
        begun = now - max(self._since, self._step_began) - (0.0 if whole else swapped)
        done = self.step
        self._dice, self.granted, self.stands_aside = Dice.now(self.device), None, True
        self._send(
            TurnEnded(
                self.name, self.settings.number, done, done - self._at_step, 0,
                max(0.0, whole - swapped) if whole else 0.0, swapped, None, aside=True,
            )
        )  # fmt: skip
        with suppress(Exception):  # no other job gets the arena then, and each is told why
            clear_arena()
        put_behind(self._trainer, True)
        grant = self.grants.get()
        put_behind(self._trainer, False)
        self.stands_aside = False
        if grant is None:  # the fleet has ended: the turn ends after the step, and the job with it
            self.grants.put(None)
            grant = self._grant
        self._goes_on(grant)
        self._since -= begun
        self.waited += self._since - now

    def _check_spoilt(self) -> None:
        if self.spoilt is not None:
            raise FleetError(
                f"a step of job {self.name} stood aside for another job, and could not go on where"
                f" it was ({self.spoilt}): its weights are lost. Begin the job again from its last"
                " checkpoint"
            ) from self.spoilt

    # ---- for the strategy ------------------------------------------------------------------------

    def _runner(self, plan: Plan, key: Hashable, target: Target) -> Runner:
        """Return a runner on the device's stage, as soon as there is memory for it."""
        if not self._planned and self._trainer is not None and self._trainer.training:
            memory = self._tenancy.memory(plan)
            more = loader_bytes(self._trainer) + (self.input.room if self.input else 0)
            memory = replace(memory, host_bytes=memory.host_bytes + more)
            self._report(
                memory,
                plan_line(plan),
                step_seconds=plan.predicted_seconds,
                tail_seconds=self._tenancy.tail_seconds(plan),
                swap_seconds=swap_seconds(plan),
            )
        runner = self._tenancy.runner(plan, key, target)
        self._runners.add(runner)
        self._tell_runners()
        return runner

    def _tell_runners(self) -> None:
        """Have the runners say when only the tail of a step is left, if the turn shares it."""
        shares = isinstance(self._grant, Turn) and self._grant.share
        for runner in self._runners:
            runner.tails = self if shares else None

    def _report(
        self,
        memory: JobMemory,
        about: str,
        step_seconds: float = 0.0,
        tail_seconds: float = 0.0,
        swap_seconds: float = 0.0,
    ) -> None:
        """Say what the job needs, and wait in the lobby until it may take that."""
        self._planned = True
        left = steps_left(self.name, self._trainer, self.step)
        self._hand_over(
            Planned(
                self.name, self.settings.number, self.step, left, step_seconds, tail_seconds,
                swap_seconds, memory, about, self.turn_seconds,
                validation_seconds(self._trainer, left, step_seconds),
                self.metric if self._has_stepped else self.earlier_metric,
                self.input.label if self.input else "",
            )
        )  # fmt: skip

    # ---- the baton -------------------------------------------------------------------------------

    def _hand_over(self, event: Event) -> None:
        self._tidy()
        self._dice, self.granted = Dice.now(self.device), None
        self._send(event)
        self._wait()

    def _tidy(self) -> None:
        self._hand_overs += 1
        self._tenancy.tidy(at_once=self._hand_overs <= SETTLING)

    def _wait(self, under_way: int = 0) -> None:
        """Wait for a grant. `under_way`: a step of an earlier turn that has not been counted."""
        before = time.monotonic()
        put_behind(self._trainer, True)
        grant = self.grants.get()
        put_behind(self._trainer, False)
        if grant is None:
            raise JobLeft(self.step)  # the fleet has ended, and nobody asks for a checkpoint
        self._goes_on(grant, under_way)
        self.waited += self._since - before
        if isinstance(grant, Leave) and not self._has_stepped:
            raise JobLeft(self.step)  # its checkpoint, or its beginning, is where it is

    def _goes_on(self, grant: Grant | None, under_way: int = 0) -> None:
        """Begin what was granted, with the job's own dice."""
        self._dice.roll(self.device)
        self._since, self._swapped = time.monotonic(), self._tenancy.swapped_seconds
        self._step_began = self._since
        self._at_step = self.step + under_way
        self._grant = grant
        self._tell_runners()
        if isinstance(grant, Leave):
            self.leave_asked = grant.why
