"""What a job sees of the fleet: its turn, its strategy, and whether it has to leave.

    job's thread   | capture, plan .. wait | step step step | wait ........ | step step | wait
    the device          Start -> Planned        Turn -> TurnEnded                Turn -> ...

A job's thread runs only from a grant to its hand-over. Before it waits it keeps its dice, and it
rolls them when it goes on. Whoever holds the grant holds the baton: no other thread of this process
runs a job's code, captures a step, or uses the device.
"""

import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from weakref import WeakSet

import lightning as L
import torch

from loaders.stats import LoaderStats
from offload import Plan, Runner
from offload.memory.host_needs import swap_seconds
from offload.sizes import say_size
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
from trainers.fleet.jobs.job_left import JobLeft
from trainers.fleet.jobs.job_strategy import JobStrategy
from trainers.fleet.jobs.tenancy import Tenancy
from trainers.lightning_seams import combined_loader
from trainers.offloading.hardware.target import Target

Grant = Start | Turn | Leave
SETTLING = 8
"""In so many turns a job leaves most behind: it is captured, compared, and audited."""


@dataclass(frozen=True, slots=True)
class SeatSettings:
    """What all seats of one device have in common."""

    device: torch.device
    number: int
    """The device's number in the fleet."""
    budget: str | int | None
    metric: str | None
    """The metric that the fleet watches."""
    checkpoint_seconds: float
    """A job's checkpoint is renewed when it is so old."""


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
        self.waited = 0.0
        """The seconds that the job has waited for its turns."""
        self._tenancy = tenancy
        self._dice = dice
        self._send = send
        self._trainer: L.Trainer | None = None
        self._planned = False
        self._trained = False
        """Whether training is over. A test that follows logs other metrics, or others' values."""
        self._last_metric: float | None = None
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
        self._shared = False
        """Whether the device was passed on before the end of the step under way."""

    # ---- for a job's program ---------------------------------------------------------------------

    def strategy(self, **options: Any) -> JobStrategy:
        """Return an `OffloadStrategy` with these options, within the fleet's budget and on its
        device."""
        on_gpu = self.device.type == "cuda"  # a CPU is its own host: no tail is hidden there
        return JobStrategy(self._runner, on_gpu, **{"budget": self.budget, **options})

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
        self._trainer = None
        self.callbacks.clear()  # Lightning lets each of them refer to the module

    @property
    def turn_seconds(self) -> float:
        """The seconds since the last grant."""
        return time.monotonic() - self._since

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
        if not self._planned and (needed := memory()) is not None:
            self._report(needed, "plain Lightning, without a plan")
        if self.turn_over:
            self._hand_over(self._turn_ended())

    def batch_over(self, memory: Callable[[], JobMemory]) -> None:
        """Note that a batch has run. `memory`: what the job needs if it turns out to have no
        plan."""
        self._has_stepped = True
        if not self._planned:
            self._report(memory(), "trains eagerly, without a plan")

    def training_over(self) -> None:
        """Note the metric that training ends with."""
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
        """`under_way`: a step whose host tail still runs. It counts as done."""
        done, metric = self.step + under_way, self.metric
        swapped = self._tenancy.swapped_seconds - self._swapped
        return TurnEnded(
            job=self.name,
            device=self.settings.number,
            step=done,
            steps=done - self._at_step,
            left=self._steps_left(done),
            seconds=max(0.0, self.turn_seconds - swapped),
            swap_seconds=swapped,
            metric=metric,
            instead=self.logged if metric is None else "",
        )

    def _steps_left(self, done: int) -> int:
        assert self._trainer is not None
        total = self._trainer.estimated_stepping_batches
        if total < 0 or math.isinf(total):
            raise FleetError(
                f"job {self.name} has no end: give its Trainer max_epochs or max_steps, so that the"
                " fleet can share its devices"
            )
        return max(0, int(total) - done)

    # ---- for the strategy ------------------------------------------------------------------------

    def _runner(self, plan: Plan, key: Hashable, target: Target) -> Runner:
        """Return a runner on the device's stage, as soon as there is memory for it."""
        if not self._planned and self._trainer is not None and self._trainer.training:
            strategy = self._trainer.strategy
            copies = strategy.copies_of_first_steps if isinstance(strategy, JobStrategy) else 0
            trained = [p for p in self._trainer.lightning_module.parameters() if p.requires_grad]
            memory = self._tenancy.memory(plan, copies, sum(p.nbytes for p in trained))
            memory = replace(memory, host_bytes=memory.host_bytes + loader_bytes(self._trainer))
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
        self._hand_over(
            Planned(
                job=self.name,
                device=self.settings.number,
                step=self.step,
                left=self._steps_left(self.step),
                step_seconds=step_seconds,
                tail_seconds=tail_seconds,
                swap_seconds=swap_seconds,
                memory=memory,
                about=about,
                seconds=self.turn_seconds,
                metric=self.metric,
            )
        )

    # ---- the baton -------------------------------------------------------------------------------

    def _hand_over(self, event: Event) -> None:
        self._tidy()
        self._dice = Dice.now(self.device)
        self._send(event)
        self._wait()

    def _tidy(self) -> None:
        self._hand_overs += 1
        self._tenancy.tidy(at_once=self._hand_overs <= SETTLING)

    def _wait(self, under_way: int = 0) -> None:
        """Wait for a grant. `under_way`: a step of an earlier turn that has not been counted."""
        before = time.monotonic()
        self._grant = grant = self.grants.get()
        if grant is None:
            raise JobLeft(self.step)  # the fleet has ended, and nobody asks for a checkpoint
        self._since, self._swapped = time.monotonic(), self._tenancy.swapped_seconds
        self.waited += self._since - before
        self._tell_runners()
        self._dice.roll(self.device)
        self._at_step = self.step + under_way
        if isinstance(grant, Leave):
            self.leave_asked = grant.why
            if not self._has_stepped:
                raise JobLeft(self.step)  # its checkpoint, or its beginning, is where it is


def loader_bytes(trainer: L.Trainer) -> int:
    """Return what the buffers and caches of the train loaders take, as far as they say it."""
    loaders = combined_loader(trainer)
    found = [getattr(one, "stats", None) for one in (loaders.flattened if loaders else ())]
    kept = [stats for stats in found if isinstance(stats, LoaderStats)]
    return sum(stats.buffer_bytes + stats.batch_bytes + stats.cache_bytes for stats in kept)


def plan_line(plan: Plan) -> str:
    """Say on one line what a plan takes."""
    device, host = say_size(plan.device_bytes), say_size(plan.host_bytes)
    return f"{device} of the device, {host} of the host, {plan.predicted_seconds:.3g} s a step"
