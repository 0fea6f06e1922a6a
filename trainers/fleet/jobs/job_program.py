"""What a job's thread runs."""

from typing import Protocol

from trainers.fleet.jobs.seat import Seat


class JobProgram(Protocol):
    """Builds a Trainer with `seat.strategy(...)` and `seat.callbacks`, and fits with it.

    It is called in the job's thread, at the beginning and again after the job has left: then it
    goes on from its own checkpoint in `seat.folder`. While `seat.leave_asked` is not empty, the
    program writes a checkpoint as soon as it can and raises `JobLeft`. A program is pickled if the
    fleet has processes."""

    def __call__(self, seat: Seat) -> None: ...
