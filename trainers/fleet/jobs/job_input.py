"""What a job reads: its own loader, or a view of the stream that it shares with other jobs.

the view needs the turns of others      the turn ends; the next one goes on with the same batch
the job has to leave meanwhile          it leaves here, if a checkpoint can be written here
                                        else it reads on alone, to where one can
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainers.fleet.inputs.same_input import shareable
from trainers.fleet.inputs.shared_inputs import SharedInputs
from trainers.fleet.jobs.turns import leave_for_good

if TYPE_CHECKING:
    from trainers.fleet.jobs.seat import Seat


class JobInput:
    """One job's."""

    def __init__(self, seat: "Seat", inputs: SharedInputs) -> None:
        self._seat = seat
        self._inputs = inputs
        self.leave_here: Callable[[], None] | None = None
        """Leaves between the batches that the loader has given, if a checkpoint can be written."""

    def shared(self, loader: Any, given: Any = None) -> Any:
        """Return what the job trains with: a view, if other jobs could read this loader, too.
        `given`: what the user gave to the job, where it was the loader itself. It stays as it is:
        each job that has it begins where it stands."""
        if not shareable(loader):
            return loader
        return self._inputs.view(self._seat.name, loader, given, self._wait)

    @property
    def label(self) -> str:
        """The name of the stream; jobs with the same one share it."""
        return self._inputs.label(self._seat.name)

    @property
    def room(self) -> int:
        """The job's part of the bytes that the stream may come to keep."""
        return self._inputs.room(self._seat.name)

    def leave(self) -> None:
        """Have nobody wait for the job: it has ended, or left."""
        self.leave_here = None
        self._inputs.leave(self._seat.name)

    def _wait(self, jobs: tuple[str, ...]) -> bool:
        turn = self._seat.wait_for(jobs)
        if turn is not None:
            self._inputs.rest(turn.without)
            return True
        trainer = self._seat.trainer
        if trainer is not None and self._seat.leave_asked == "stopped":
            leave_for_good(self._seat, trainer)
        if self._seat.leave_asked and self.leave_here is not None:
            self.leave_here()
        return False
