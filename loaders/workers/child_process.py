"""One worker process of `WorkerProcess`, seen from its parent: a pipe, and memory that both see."""

import math
import pickle
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from mmap import mmap
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from loaders.slots.leaves import Sample
from loaders.workers.staging import IDLE, PROGRESS, Staging, mapped, unpack
from loaders.workers.worker import Reply, Request

LOOK_SECONDS = 1.0  # the longest time between two looks whether the child is still there
LOOKS = 8  # the least number of looks within the `timeout` of a sample
JOIN_SECONDS = 0.1  # the time between two looks whether a child that is to end has ended
END_SECONDS = (5.0, 1.0, 5.0)  # the time to end: by itself, after SIGTERM, after SIGKILL


class ProcessLost(Exception):
    """The process at the other end is dead or dying."""


class NoAnswer(Exception):
    """The process at the other end is there, but has not answered in time."""


class ReadTimeout(Exception):
    """The process at the other end has been at a sample of the chunk for too long."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        """The sample's number in the chunk."""


def shut(pipe: Connection, how: int = socket.SHUT_RDWR) -> None:
    """Wake up whoever waits at the other end, and with SHUT_RDWR at this one, even if a process
    that was forked meanwhile holds this end open."""
    with suppress(OSError):  # the other process may have ended already
        end = socket.fromfd(pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM)
        with end:
            end.shutdown(how)


class ChildProcess:
    """A process that was started. It is used until it is ended, and then never again."""

    def __init__(self, process: BaseProcess, pipe: Connection, timeout: float | None) -> None:
        """A sample may take `timeout` seconds; None: as long as it takes."""
        self._process = process
        self._pipe = pipe
        self._timeout = timeout
        self._area: mmap | None = None
        """Where it puts the arrays of samples."""
        self._outbox: Staging | None = None
        """Where the parent puts those of samples that are to be changed."""
        self._change = b""
        """The pickled function that the process has, which changes samples."""

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None, "the process was started"
        return pid

    def send(self, request: Request, outbox: Staging | None = None) -> None:
        try:
            self._pipe.send_bytes(pickle.dumps(request))
            if outbox is not None and request.area_bytes:
                outbox.send(self._pipe, self.pid)
        except OSError as error:
            raise ProcessLost from error

    def send_samples(
        self, change: bytes, samples: Sequence[Sample], ids: list[int], keys: list[int]
    ) -> None:
        """Send samples that the pickled function `change` is to change."""
        outbox = self._outbox = self._outbox or Staging()
        outbox.begin()
        packed = [outbox.pack(*each) for each in zip(samples, ids, strict=True)]
        news = b"" if change == self._change else change
        self.send(Request(ids, keys, packed, outbox.grown_bytes, change=news), outbox)
        self._change = change

    def receive(self, within: float = math.inf) -> Reply:
        """Wait for the answer. Raises `NoAnswer` if it has not come within so many seconds."""
        pipe, process = self._pipe, self._process
        look = min(LOOK_SECONDS, (self._timeout or LOOK_SECONDS) / LOOKS)
        at, since = IDLE, time.monotonic()
        end = since + within
        try:
            # Waiting for the pipe alone may not end: a process that was forked meanwhile may hold
            # its other end open.
            while not connection.wait([pipe, process.sentinel], look):
                if process.exitcode is not None:
                    break
                if (number := self.current_sample()) != at:
                    at, since = number, time.monotonic()
                elif at != IDLE and time.monotonic() - since > (self._timeout or float("inf")):
                    raise ReadTimeout(at)
                if time.monotonic() > end:
                    raise NoAnswer
            if not pipe.poll():
                raise ProcessLost
            reply: Reply = pickle.loads(pipe.recv_bytes())
            if reply.area_bytes:
                self._area = mapped(pipe, reply.area_bytes)
            if reply.failure is not None:
                self._change = b""  # it may be what could not be rebuilt there
        except (OSError, EOFError) as error:
            raise ProcessLost from error
        return reply

    def samples(self, reply: Reply) -> Sequence[Sample]:
        """The samples of a reply. Their arrays lie in the area."""
        area = self._area
        assert area is not None
        samples = [unpack(sample, area) for sample in reply.samples]
        if reply.rows is None:
            return samples
        rows = reply.rows.unpacked(area)
        return [*rows, *samples] if samples else rows

    def current_sample(self) -> int:
        """The number of the sample that the process is at."""
        return PROGRESS.unpack_from(self._area)[0] if self._area is not None else IDLE

    def kill(self) -> None:
        self._process.kill()

    def shut_pipe(self) -> None:
        """Tell the process to end, even if another one has inherited our end of the pipe."""
        shut(self._pipe, socket.SHUT_WR)

    def hang_up(self) -> None:
        """Tell the process to end, and close what leads to it."""
        outbox, self._outbox, self._area = self._outbox, None, None
        if outbox is not None:
            outbox.close()
        self.shut_pipe()
        self._pipe.close()

    def end(self) -> int | None:
        """Make the process end, after `hang_up`; returns its exit code."""
        process = self._process
        hurries = (None, process.terminate, process.kill)
        for hurry, seconds in zip(hurries, END_SECONDS, strict=True):
            if hurry is not None:
                hurry()
            # One long join may not return: a process that was forked meanwhile may hold the
            # sentinel open. So its exit code is looked at every `JOIN_SECONDS`.
            for _ in range(int(seconds / JOIN_SECONDS)):
                process.join(JOIN_SECONDS)
                if (code := process.exitcode) is not None:
                    process.close()
                    return code
        return None
