"""The jobs of one device in this process: threads that take turns, and the stage that they share.

    command --> the job's thread goes on ...... --> event
                one command at a time: its job has the baton until its event is sent

The host itself runs no job's code. It is called by the fleet's loop, or by the loop of a device's
process.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainers.dice import Dice
from trainers.fleet.deciding.events import Command, Event, Start, Yield
from trainers.fleet.jobs.job_program import JobProgram
from trainers.fleet.jobs.job_thread import JobThread
from trainers.fleet.jobs.seat import SeatSettings
from trainers.fleet.jobs.tenancy import Tenancy


@dataclass(frozen=True, slots=True, eq=False)
class HostedJob:
    """What a device needs to run a job."""

    program: JobProgram
    folder: Path
    dice: Dice
    """The dice when the job was added."""


class DeviceHost:
    """A context manager."""

    def __init__(self, settings: SeatSettings, send: Callable[[Event], None]) -> None:
        self._settings = settings
        self._send = send
        self._tenancy = Tenancy(settings.device)
        self._threads: dict[str, JobThread] = {}

    def do(self, command: Command, job: HostedJob) -> None:
        """Let a job go on. The device must have nothing else to do, but for a Yield, which goes to
        the job that it runs."""
        name = command.job
        if isinstance(command, Yield):
            self._threads[name].seat.yields = True
            return
        if isinstance(command, Start):
            if name in self._threads:
                self._threads[name].join()  # it left before, and comes back
            self._threads[name] = JobThread(
                name, job.program, job.folder, self._settings, self._tenancy, job.dice, self._send
            )
        self._threads[name].grant(command)

    def close(self) -> None:
        """End all jobs where they wait, and the stage."""
        for thread in self._threads.values():
            thread.end()
        self._tenancy.close()

    def __enter__(self) -> "DeviceHost":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
