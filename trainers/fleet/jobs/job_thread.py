"""The thread of one job."""

import gc
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace

from trainers.fleet.deciding.events import Departed, Event, Failed, Finished, Turn
from trainers.fleet.deciding.fleet_error import FleetError
from trainers.fleet.jobs.baton import Grant
from trainers.fleet.jobs.bystander import Bystander
from trainers.fleet.jobs.leaving import JobLeft
from trainers.fleet.jobs.seat import JobProgram, Seat
from trainers.fleet.jobs.tenancy import Tenancy, give_freed_memory_back
from trainers.fleet.jobs.turns import TurnKeeper

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
        event = self._last_event()
        gc.collect()  # a Trainer and its module refer to each other; now their memory is free
        give_freed_memory_back()
        if not isinstance(event, Failed):
            event = replace(event, seconds=self._seat.turns.seconds())
        self._send(event)

    def _last_event(self) -> Finished | Departed | Failed:
        """Run the program to its end, and return the event for it. No reference to the job's module
        or Trainer is left then."""
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
