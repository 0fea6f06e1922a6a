"""The jobs of one device in this process: threads that take turns, and the stage that they share.

    command --> the job's thread runs ...... --> event

A device gets one command at a time. The fleet's loop calls the host, or the loop of a device's
process. The host itself runs no job's code.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainers.fleet.deciding.events import Command, Event, Start, Yield
from trainers.fleet.inputs.input_link import InputLink
from trainers.fleet.inputs.shared_inputs import SharedInputs
from trainers.fleet.jobs.job_thread import JobThread
from trainers.fleet.jobs.seat import JobProgram, Seat
from trainers.fleet.jobs.seat_settings import SeatSettings
from trainers.fleet.jobs.tenancy import Tenancy
from trainers.random_state import RandomState

BANNER_LOGGER = "lightning.pytorch.utilities.rank_zero"
BANNER_STARTS = ("GPU available: ", "TPU available: ", "💡 Tip: ")


@dataclass(frozen=True, slots=True, eq=False)
class HostedJob:
    """What a device needs to run a job."""

    program: JobProgram
    folder: Path
    random_state: RandomState
    """That of the process when the job was added."""
    priority: int = 0


class DeviceHost:
    """A context manager."""

    def __init__(self, settings: SeatSettings, send: Callable[[Event], None]) -> None:
        self._settings = settings
        self._send = send
        self._tenancy = Tenancy(settings.device)
        self._inputs = _make_inputs(settings)
        self._threads: dict[str, JobThread] = {}
        self._priorities: set[int] = set()
        self._banner = BannerFilter(is_first=settings.number == 0)

    def do(self, command: Command, job: HostedJob) -> None:
        """Send a command to a job. The device must be idle, except for a Yield, which goes to the
        job that it runs."""
        name = command.job
        if isinstance(command, Yield):
            self._threads[name].end_turn_early(command.at_once)
            return
        if isinstance(command, Start):
            self._priorities.add(job.priority)
            if len(self._priorities) > 1:
                self._tenancy.expect_cuts()
            if name in self._threads:
                self._threads[name].join()  # it has left before
            seat = Seat(
                name, job.folder, self._settings, self._tenancy, job.random_state, self._send,
                self._inputs,
            )  # fmt: skip
            self._threads[name] = JobThread(seat, job.program, self._tenancy, self._send)
        self._threads[name].grant(command)

    def close(self) -> None:
        """End all jobs where they wait, and the stage."""
        for thread in sorted(self._threads.values(), key=lambda thread: thread.stands_aside):
            thread.end()  # a step that stands aside resumes only when no other job has a turn
        self._banner.close()
        self._inputs.close()
        self._tenancy.close()

    def __enter__(self) -> "DeviceHost":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _make_inputs(settings: SeatSettings) -> SharedInputs:
    if settings.inputs is None:
        return SharedInputs(str(settings.number))
    # The input process may still know an earlier process of this device.
    return SharedInputs(f"{settings.number}-{os.getpid()}", InputLink(settings.inputs))


class BannerFilter(logging.Filter):
    """Passes each line of Lightning's banner (the machine's devices, tips) for one job only. All
    other lines pass."""

    def __init__(self, is_first: bool) -> None:
        """`is_first`: whether this process has the first device, which logs the banner."""
        super().__init__()
        self._is_first = is_first
        self._logged: set[str] = set()
        logging.getLogger(BANNER_LOGGER).addFilter(self)

    def close(self) -> None:
        logging.getLogger(BANNER_LOGGER).removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        line, by_job = record.getMessage(), str(record.threadName).startswith("perfect-job-")
        if not by_job or not line.startswith(BANNER_STARTS):
            return True
        is_new = self._is_first and line not in self._logged
        self._logged.add(line)
        return is_new
