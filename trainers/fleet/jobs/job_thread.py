"""The thread of one job."""

import gc
import logging
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning as L

from offload.errors import OffloadError
from offload.running.stage import Stage
from trainers.fleet.deciding.events import (
    Departed,
    Event,
    Failed,
    Finished,
    FleetError,
    JobMemory,
    Turn,
)
from trainers.fleet.jobs.job_turns import JobLeft, JobTurns, leave_for_good
from trainers.fleet.jobs.seat import JobProgram, JobStrategy, Seat
from trainers.fleet.jobs.tenancy import Grant, Tenancy, give_freed_memory_back

log = logging.getLogger(__name__)

PAUSE_SECONDS = 1e-3


class Bystander:
    """The hand-over in one turn of a job, until the job has the device or the turn ends."""

    def __init__(self, job: str, turns: JobTurns, turn: Turn, tenancy: Tenancy) -> None:
        self.turn = turn
        self._job = job
        self._turns = turns
        self._tenancy = tenancy
        threading.Thread(target=self._run, name=f"perfect-job-{job}-aside", daemon=True).start()

    def _is_turn_running(self) -> bool:
        return self._turns.baton.grant is self.turn

    def _run(self) -> None:
        try:
            while self._is_turn_running():
                stage = self._tenancy.stage  # there is none before the first step of all jobs
                if stage is not None:
                    with stage.gate.granted(inside=True):
                        # The job's thread waits for this block, if its turn still runs.
                        if self._is_turn_running() and stage.step_thread is not None:
                            self._hand_over(stage)
                            return
                time.sleep(PAUSE_SECONDS)
        except BaseException as error:
            self._turns.baton.step_error = error

    def _hand_over(self, stage: Stage) -> None:
        began = False
        try:
            with stage.let_others_step() as copies:
                began = True
                self._turns.stand_aside(copies.make)
        except OffloadError as error:
            if began:
                raise
            log.warning("the turn of job %s ends after its step: %s", self._job, error)


class TurnKeeper(L.Callback):
    """One job's."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._turns = seat.turns

    def state_dict(self) -> dict[str, Any]:
        metric = self._seat.progress.metric
        return {} if metric is None else {"metric": metric}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._seat.progress.checkpoint_metric = state_dict["metric"]

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._seat.progress.trainer = trainer

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any, **__: Any
    ) -> None:
        has_plan = isinstance(trainer.strategy, JobStrategy)
        self._turns.begin_step(lambda: None if has_plan else self._memory(trainer, pl_module))
        if self._seat.leave_asked == "stopped":
            leave_for_good(self._seat.name, self._seat.folder, trainer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any, **__: Any
    ) -> None:
        strategy = trainer.strategy
        is_open = isinstance(strategy, JobStrategy) and strategy.is_in_step
        self._turns.end_batch(lambda: None if is_open else self._memory(trainer, pl_module))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._turns.end_training()

    def _memory(self, trainer: L.Trainer, module: L.LightningModule) -> JobMemory:
        """Return what plain Lightning keeps where the kernels run: what the user says, or else the
        bytes of weights, gradients and two averages of them, as Adam has."""
        weights = sum(t.nbytes for t in (*module.parameters(), *module.buffers()))
        trained = sum(p.nbytes for p in module.parameters() if p.requires_grad)
        total = self._seat.reserve or weights + 3 * trained
        if trainer.strategy.root_device.type == "cpu":
            return JobMemory(host_bytes=total)
        return JobMemory(host_bytes=0, passing_bytes=weights, device_bytes=total)


JOIN_SECONDS = 30.0


class JobThread:
    """Runs a job's program when it is granted a turn, and sends one event for every grant."""

    def __init__(
        self, seat: Seat, program: JobProgram, tenancy: Tenancy, send: Callable[[Event], None]
    ) -> None:
        seat.callbacks.append(TurnKeeper(seat))
        self._seat = seat
        self._program: JobProgram | None = program
        self._tenancy = tenancy
        self._send = send
        self._bystander: Bystander | None = None
        name = f"perfect-job-{seat.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def grant(self, grant: Grant) -> None:
        """Let the thread go on. No other job of the device may have a grant."""
        self._seat.turns.ends_early = False  # this was for an earlier turn
        self._seat.turns.baton.give(grant)
        if self._thread.ident is None:
            self._thread.start()

    def end_turn_early(self, at_once: bool) -> None:
        """End its turn after the current step, or in the middle of it."""
        turns = self._seat.turns
        turns.ends_early = True
        turn = turns.baton.grant
        is_asked = self._bystander is not None and self._bystander.turn is turn
        if at_once and isinstance(turn, Turn) and not is_asked:
            self._bystander = Bystander(self._seat.name, turns, turn, self._tenancy)

    @property
    def stands_aside(self) -> bool:
        return self._seat.turns.baton.stands_aside

    def end(self) -> None:
        """End the thread where it waits, or after its step, and wait for that."""
        self._seat.turns.ends_early = True
        self._seat.turns.baton.give(None)
        self.join()

    def join(self) -> None:
        """Wait for the end of a thread whose last event has come."""
        if self._thread.ident is not None:
            self._thread.join(JOIN_SECONDS)
            if self._thread.is_alive():
                raise FleetError(
                    f"the thread of job {self._seat.name} did not end within {JOIN_SECONDS:.0f} s"
                )

    def _run(self) -> None:
        self._tenancy.join()
        event = self._last_event()
        gc.collect()  # a Trainer and its module refer to each other; now their memory is free
        self._tenancy.leave()
        give_freed_memory_back()
        if not isinstance(event, Failed):
            event = replace(event, seconds=self._seat.turns.seconds())
        self._send(event)

    def _last_event(self) -> Finished | Departed | Failed:
        """Run the program to its end, and return the event for it. The program is let go."""
        seat, program = self._seat, self._program
        assert program is not None
        self._program = None
        name, device = seat.name, seat.settings.number
        try:
            seat.turns.begin()
            seat.folder.mkdir(parents=True, exist_ok=True)
            program(seat)
            return Finished(name, device, seat.progress.step, 0.0, seat.progress.metric)
        except JobLeft as left:
            return Departed(name, device, left.step)
        except BaseException as error:
            return Failed(name, device, one_line(error), "".join(traceback.format_exception(error)))
        finally:
            seat.close()


def one_line(error: BaseException) -> str:
    """Return the first line of an error with its type."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
