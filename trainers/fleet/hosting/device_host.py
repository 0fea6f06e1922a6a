"""The jobs of one device in this process: threads that take turns, and the stage that they share.

    command --> the job's thread goes on ...... --> event
                one command at a time: its job has the baton until its event is sent

The host itself runs no job's code. It is called by the fleet's loop, or by the loop of a device's
process.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainers.dice import Dice
from trainers.fleet.deciding.events import Command, Event, Start, Yield
from trainers.fleet.inputs.input_link import InputLink
from trainers.fleet.inputs.shared_inputs import SharedInputs
from trainers.fleet.jobs.job_program import JobProgram
from trainers.fleet.jobs.job_thread import JobThread
from trainers.fleet.jobs.seat_settings import SeatSettings
from trainers.fleet.jobs.tenancy import Tenancy

SAID_BY = "lightning.pytorch.utilities.rank_zero"
BEGINS = ("GPU available: ", "TPU available: ", "💡 Tip: ")


@dataclass(frozen=True, slots=True, eq=False)
class HostedJob:
    """What a device needs to run a job."""

    program: JobProgram
    folder: Path
    dice: Dice
    """The dice when the job was added."""
    priority: int = 0


class DeviceHost:
    """A context manager."""

    def __init__(self, settings: SeatSettings, send: Callable[[Event], None]) -> None:
        self._settings = settings
        self._send = send
        self._tenancy = Tenancy(settings.device)
        self._inputs = _inputs_of(settings)
        self._threads: dict[str, JobThread] = {}
        self._priorities: set[int] = set()
        self._banner = Banner(says=settings.number == 0)

    def do(self, command: Command, job: HostedJob) -> None:
        """Let a job go on. The device must have nothing else to do, but for a Yield, which goes to
        the job that it runs."""
        name = command.job
        if isinstance(command, Yield):
            self._threads[name].end_turn_early(command.at_once)
            return
        if isinstance(command, Start):
            self._priorities.add(job.priority)
            if len(self._priorities) > 1:
                self._tenancy.expect_cuts()
            if name in self._threads:
                self._threads[name].join()  # it left before, and comes back
            self._threads[name] = JobThread(
                name, job.program, job.folder, self._settings, self._tenancy, job.dice, self._send,
                self._inputs,
            )  # fmt: skip
        self._threads[name].grant(command)

    def close(self) -> None:
        """End all jobs where they wait, and the stage."""
        for thread in sorted(self._threads.values(), key=lambda thread: thread.stands_aside):
            thread.end()  # a step that stands aside goes on only when nobody else has a turn
        self._banner.close()
        self._inputs.close()
        self._tenancy.close()

    def __enter__(self) -> "DeviceHost":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _inputs_of(settings: SeatSettings) -> SharedInputs:
    if settings.inputs is None:
        return SharedInputs(str(settings.number))
    # The process of a device that has ended may still be known there.
    return SharedInputs(f"{settings.number}-{os.getpid()}", InputLink(settings.inputs))


class Banner(logging.Filter):
    """Passes each line of Lightning's banner (what the machine has, and tips) for one job. What
    else jobs and others say passes always."""

    def __init__(self, says: bool) -> None:
        """`says`: whether this process has the device that says it for all."""
        super().__init__()
        self._says = says
        self._said: set[str] = set()
        logging.getLogger(SAID_BY).addFilter(self)

    def close(self) -> None:
        logging.getLogger(SAID_BY).removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        line = record.getMessage()
        if not str(record.threadName).startswith("perfect-job-") or not line.startswith(BEGINS):
            return True
        first = self._says and line not in self._said
        self._said.add(line)
        return first
