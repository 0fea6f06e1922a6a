"""The thread of one job."""

import gc
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from trainers.dice import Dice
from trainers.fleet.deciding.events import Event, Failed, Finished, Left
from trainers.fleet.deciding.fleet_error import FleetError
from trainers.fleet.inputs.shared_inputs import SharedInputs
from trainers.fleet.jobs.freed_memory import give_freed_memory_back
from trainers.fleet.jobs.job_input import JobInput
from trainers.fleet.jobs.job_left import JobLeft
from trainers.fleet.jobs.job_program import JobProgram
from trainers.fleet.jobs.seat import Grant, Seat
from trainers.fleet.jobs.seat_settings import SeatSettings
from trainers.fleet.jobs.tenancy import Tenancy
from trainers.fleet.jobs.turns import TurnKeeper

JOIN_SECONDS = 30.0


class JobThread:
    """Runs a job's program whenever it is granted a turn, and sends one event for every grant."""

    def __init__(
        self,
        name: str,
        program: JobProgram,
        folder: Path,
        settings: SeatSettings,
        tenancy: Tenancy,
        dice: Dice,
        send: Callable[[Event], None],
        inputs: SharedInputs,
    ) -> None:
        self.seat = Seat(name, folder, settings, tenancy, dice, send)
        self.seat.input = JobInput(self.seat, inputs)
        self.seat.callbacks.append(TurnKeeper(self.seat))
        self._program: JobProgram | None = program
        self._send = send
        self._thread = threading.Thread(target=self._run, name=f"perfect-job-{name}", daemon=True)

    def grant(self, grant: Grant) -> None:
        """Let the thread go on. The one that has the baton must have handed it over."""
        self.seat.yields = False  # what was asked of an earlier turn
        self.seat.granted = grant
        self.seat.grants.put(grant)
        if self._thread.ident is None:
            self._thread.start()

    def end_turn_early(self, at_once: bool) -> None:
        """End its turn after the step under way, or in the middle of it."""
        self.seat.yields = True
        if at_once:
            self.seat.ask_to_stand_aside()

    @property
    def stands_aside(self) -> bool:
        return self.seat.stands_aside

    def end(self) -> None:
        """End the thread where it waits, or after its step, and wait for that."""
        self.seat.fleet_ended = True
        self.seat.grants.put(None)
        self.join()

    def join(self) -> None:
        """Wait for the end of a thread whose last event has come."""
        if self._thread.ident is not None:
            self._thread.join(JOIN_SECONDS)
            if self._thread.is_alive():
                raise FleetError(
                    f"the thread of job {self.seat.name} did not end within {JOIN_SECONDS:.0f} s"
                )

    def _run(self) -> None:
        event = self._last_event()
        gc.collect()  # a Trainer and its module refer to each other; now their memory is free
        give_freed_memory_back()
        if not isinstance(event, Failed):
            event = replace(event, seconds=self.seat.turn_seconds)
        self._send(event)

    def _last_event(self) -> Finished | Left | Failed:
        """Run the program to its end, and return what to say of it. No reference to the job's
        module or Trainer is left then."""
        seat, program = self.seat, self._program
        assert program is not None
        self._program = None
        name, device = seat.name, seat.settings.number
        try:
            seat.begin()
            seat.folder.mkdir(parents=True, exist_ok=True)
            program(seat)
            return Finished(name, device, seat.step, 0.0, seat.metric)
        except JobLeft as left:
            return Left(name, device, left.step)
        except BaseException as error:
            return Failed(name, device, one_line(error), "".join(traceback.format_exception(error)))
        finally:
            seat.end()


def one_line(error: BaseException) -> str:
    """Return the first line of an error with its type."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
