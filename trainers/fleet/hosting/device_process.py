"""One device in a process of its own: commands go in through a pipe, events come out of it.

    caller's process                               process of the device
    do(command)   --pipe-->  main thread: DeviceHost.do   --> a job's thread
    send(event)  <--pipe--   a thread reads        <-- event --

A process that dies (a segmentation fault, the system's killer) is reported as `DeviceEnded`. Its
jobs resume from their checkpoints in another process.
"""

import gc
import multiprocessing
import pickle
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from trainers.fleet.deciding.events import Command, DeviceEnded, Event, Yield
from trainers.fleet.deciding.fleet_error import FleetError
from trainers.fleet.hosting.child_settings import ChildSettings
from trainers.fleet.hosting.device_host import DeviceHost, HostedJob
from trainers.fleet.jobs.seat import JobProgram, Seat
from trainers.fleet.jobs.seat_settings import SeatSettings

JOIN_SECONDS = 30.0
PROGRAM = "program.pickle"


@dataclass(frozen=True, slots=True)
class PickledProgram:
    """A job's program in a file. It is read in the job's own thread, with its random state."""

    path: Path

    def __call__(self, seat: Seat) -> None:
        with self.path.open("rb") as file:
            program: JobProgram = pickle.load(file)
        program(seat)


def pickle_program(name: str, job: HostedJob) -> HostedJob:
    """Return the job with its program in a file of its folder. Raise `FleetError` if it cannot be
    pickled."""
    path = job.folder / PROGRAM
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.unlink(missing_ok=True)  # else it could be a link to a file of somebody else
        with path.open("xb") as file:
            pickle.dump(job.program, file)
    except Exception as error:  # any error of a class that cannot be pickled
        path.unlink(missing_ok=True)
        raise FleetError(
            f"job {name} cannot be sent to the process of a device: {error}. Give functions at the"
            " top level of a module instead of objects (module=make_module), or one device with"
            " isolation='thread'"
        ) from error
    return replace(job, program=PickledProgram(path))


class DeviceProcess:
    """A context manager. `send` is called by a thread of its own."""

    def __init__(self, settings: SeatSettings, send: Callable[[Event], None]) -> None:
        self._settings = settings
        self._send = send
        self._running: str | None = None
        """The job that has a command and has not answered."""
        self._closing = False
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(
            target=_serve,
            args=(theirs, settings, ChildSettings.of_this_process()),
            name=f"perfect-device-{settings.number}",
            daemon=False,
        )
        self._theirs = theirs
        self._reader = threading.Thread(
            target=self._read, name=f"perfect-device-{settings.number}-events", daemon=True
        )

    def start(self) -> None:
        self._process.start()
        self._theirs.close()  # now the pipe ends when the child dies
        self._reader.start()

    def do(self, command: Command, job: HostedJob) -> None:
        """Send a command to a job. The device must be idle, except for a Yield."""
        if not isinstance(command, Yield):
            self._running = command.job
        with suppress(BrokenPipeError, ConnectionResetError):  # the reader reports it
            self._pipe.send((command, job))

    def _read(self) -> None:
        try:
            while True:
                event: Event = self._pipe.recv()
                self._running = None
                self._send(event)
        except (EOFError, ConnectionResetError):
            pass
        if not self._closing:
            self._process.join()
            why = describe_exit(self._process.exitcode)
            self._send(DeviceEnded(self._settings.number, why, self._running))

    def close(self) -> None:
        """End the process. A job that still runs is lost."""
        self._closing = True
        if self._process.ident is None:
            return
        with suppress(BrokenPipeError, ConnectionResetError):
            self._pipe.send(None)
        self._process.join(JOIN_SECONDS if self._running is None else 0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._reader.join(JOIN_SECONDS)
        self._pipe.close()

    def __enter__(self) -> "DeviceProcess":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def describe_exit(code: int | None) -> str:
    """Return how a process ended."""
    if code is not None and code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with code {code}"


def _serve(pipe: Connection, settings: SeatSettings, child: ChildSettings) -> None:
    """Run in the process of a device."""
    child.apply()
    lock = threading.Lock()

    def send(event: Event) -> None:
        with lock:
            pipe.send(event)

    gc.collect()
    gc.freeze()  # a collection after every job need not look at what was imported
    try:
        with DeviceHost(settings, send) as host:
            while (received := _receive(pipe)) is not None:
                command, job = received
                host.do(command, job)
    finally:
        gc.unfreeze()  # libraries check for leaks at the end of a process


def _receive(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:  # the caller's process is gone
        return None
