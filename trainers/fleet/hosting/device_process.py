"""One device in a process of its own: commands go in through a pipe, events come out of it.

    caller's process                               process of the device
    do(command)   --pipe-->  main thread: DeviceHost.do   --> a job's thread
    send(event)  <--pipe--   a thread reads        <-- event --

A process that dies (a segmentation fault, the system's killer) is reported as `DeviceEnded`. Its
jobs resume from their checkpoints in another process.
"""

import gc
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from loaders.closing import ClosedAtEnd
from loaders.sharing.view_link import missing_system_calls
from trainers.fleet.deciding.events import Command, DeviceEnded, Event, FleetError, Start, Yield
from trainers.fleet.inputs.input_link import InputAddress, InputLink
from trainers.fleet.inputs.input_service import InputService
from trainers.fleet.inputs.shared_inputs import SharedInputs
from trainers.fleet.jobs.job_thread import JobThread
from trainers.fleet.jobs.seat import JobProgram, Seat
from trainers.fleet.jobs.tenancy import SeatSettings, Tenancy
from trainers.random_state import RandomState

BANNER_LOGGER = "lightning.pytorch.utilities.rank_zero"
BANNER_STARTS = ("GPU available: ", "TPU available: ", "💡 Tip: ")


@dataclass(frozen=True, slots=True, eq=False)
class HostedJob:
    """What a device needs to run a job."""

    program: JobProgram
    folder: Path
    random_state: RandomState
    priority: int = 0
    least: int = 1
    most: int = 1
    """It may train on `least` to `most` devices."""


class DeviceHost(ClosedAtEnd):
    """A context manager."""

    def __init__(self, settings: SeatSettings, send: Callable[[Event], None]) -> None:
        self._settings = settings
        self._send = send
        self._tenancy = Tenancy(settings.device)
        link = None if settings.inputs is None else InputLink(settings.inputs)
        # The input process may still know an earlier process of this device.
        name = f"{settings.number}-{os.getpid()}" if link else f"{settings.number}"
        self._inputs = SharedInputs(name, link)
        self._threads: dict[str, JobThread] = {}
        self._priorities: set[int] = set()
        self._banner = BannerFilter(is_first=settings.number == 0)

    def do(self, command: Command, job: HostedJob) -> None:
        """Send a command to a job. Only a Yield may come while the device is busy."""
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
            settings = replace(self._settings, devices=command.width, most_devices=job.most)
            seat = Seat(
                name, job.folder, settings, self._tenancy, job.random_state, self._send,
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


class BannerFilter(logging.Filter):
    """Passes each line of Lightning's banner for one job only, and all other lines."""

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


JOIN_SECONDS = 30.0
PROGRAM = "program.pickle"


@dataclass(frozen=True, slots=True)
class ChildSettings:
    """A spawned process inherits none of them."""

    threads: int
    """Threads of torch: the last bits of some kernels depend on their number."""
    levels: Mapping[str, int]
    """By logger: `perfect-train -v` and `-q` set them."""
    warnings_logged: bool

    @classmethod
    def of_this_process(cls) -> "ChildSettings":
        loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
        named = {each.name: each.level for each in loggers if isinstance(each, logging.Logger)}
        levels = {name: level for name, level in named.items() if level}
        logged = warnings.showwarning.__module__ == logging.__name__
        return cls(torch.get_num_threads(), levels, logged)

    def apply(self) -> None:
        """Set them in the spawned process. It ignores Ctrl-C: its parent ends the jobs."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        torch.set_num_threads(self.threads)
        for name, level in self.levels.items():
            logging.getLogger(name).setLevel(level)
        logging.captureWarnings(self.warnings_logged)


BACKLOG = 128


@dataclass(frozen=True, slots=True)
class PickledProgram:
    """A job's program in a file. It is read in the job's own thread, with its random state."""

    path: Path

    def __call__(self, seat: Seat) -> None:
        with self.path.open("rb") as file:
            program: JobProgram = pickle.load(file)
        program(seat)


def pickle_program(name: str, job: HostedJob) -> HostedJob:
    """Return the job with its program in a file, or raise `FleetError` if it has no pickle."""
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


class DeviceProcess(ClosedAtEnd):
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
        self._process.start()
        self._theirs.close()  # now the pipe ends when the child dies
        self._reader.start()
        return self


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
        with DeviceHost(settings, send) as host, suppress(EOFError):  # the caller's process is gone
            while (received := pipe.recv()) is not None:
                host.do(*received)
    finally:
        gc.unfreeze()  # libraries check for leaks at the end of a process


class InputProcess:
    """A context manager."""

    def __init__(self) -> None:
        name = f"\0perfect-inputs-{os.getpid()}-{os.urandom(8).hex()}"
        self.address = InputAddress(name, os.urandom(32))
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(name)
        self._listener.listen(BACKLOG)
        self._stop_reader, self._stop_writer = multiprocessing.Pipe(duplex=False)
        self._process = multiprocessing.get_context("spawn").Process(
            target=_serve_inputs,
            args=(self._listener, self.address.key, ChildSettings.of_this_process()),
            name="perfect-inputs",
            daemon=False,  # its loaders may have processes of their own
        )
        self._starter = threading.Thread(
            target=self._start, name="perfect-inputs-start", daemon=True
        )

    def _start(self) -> None:
        """Start the process when the first device connects."""
        if self._stop_reader not in wait([self._listener, self._stop_reader]):
            self._process.start()
        self._listener.close()  # now the devices notice if the process dies

    def __enter__(self) -> "InputProcess":
        self._starter.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_writer.close()
        self._starter.join()
        self._stop_reader.close()
        if self._process.ident is not None:
            self._process.kill()  # it keeps nothing on a disk
            self._process.join()


def needs_input_process(in_processes: bool, devices: int) -> bool:
    """Return whether several processes could read together on this system."""
    return in_processes and devices > 1 and not missing_system_calls()


def _serve_inputs(listener: socket.socket, key: bytes, child: ChildSettings) -> None:
    """Run in the process. It ends with that of the fleet."""
    child.apply()
    service, fleet = InputService(), multiprocessing.parent_process()
    assert fleet is not None
    while fleet.sentinel not in wait([listener, fleet.sentinel]):
        peer, _ = listener.accept()
        connection = Connection(peer.detach())
        threading.Thread(target=service.serve_device, args=(connection, key), daemon=True).start()
    service.close()
