"""The messages between a view in another process and the process of its stream.

    consumer                        server
    OpenView              ------>
                          <------   Answered           where the view stands
    BeginPass             ------>
                          <------   Served, Served     as many as may be ahead
    TookBatch             ------>                      the training loop has this one now
    LeavePass, ViewCall   ------>
                          <------   Answered           to a call

A batch says in which block of shared memory its pixels are. The descriptor of a new one follows.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import AuthenticationError, reduction
from multiprocessing.connection import (
    Client,
    Connection,
    answer_challenge,
    deliver_challenge,
    wait,
)
from typing import Any

from loaders.errors import SharingError
from loaders.sharing.lent_blocks import Shipment
from loaders.sharing.shared_view import ViewPlace
from loaders.workers.child_process import shut
from loaders.workers.worker import Failure

AHEAD = 2
"""So many batches are made for a consumer before it asks for them."""
GREETING_SECONDS = 60.0
"""A client gives up after this time: a forked process may hold a socket that nobody serves."""


@dataclass(frozen=True, slots=True)
class ViewAddress:
    """Where a view can be opened."""

    socket: str
    key: bytes
    """Clients must present this key."""
    pid: int
    """The process of the stream."""
    name: str


@dataclass(frozen=True, slots=True)
class OpenView:
    name: str
    pid: int
    place: ViewPlace | None
    """Where this consumer stood before. None: it is where the view is."""


@dataclass(frozen=True, slots=True)
class BeginPass:
    pass_number: int
    """How many passes were begun on this link. What is sent for another one has come too late."""
    returned: Sequence[int]
    """Blocks that nobody holds any longer."""


@dataclass(frozen=True, slots=True)
class TookBatch:
    returned: Sequence[int]


@dataclass(frozen=True, slots=True)
class LeavePass:
    pass_number: int


@dataclass(frozen=True, slots=True)
class ViewCall:
    """A method of the view."""

    method: str
    arguments: Sequence[Any]
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Served:
    """The next batch, or why there is none. With neither, the pass is over."""

    pass_number: int
    place: ViewPlace
    """Where the consumer is when it has this."""
    memory: Mapping[str, int]
    """What of the view's stats is no counter."""
    shipment: Shipment | None = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """Where the view stands after a call, or why it was refused."""

    place: ViewPlace | None
    memory: Mapping[str, int]
    failure: Failure | None = None


class PeerGone(Exception):
    """The process at the other end has closed the link or has ended."""


@contextmanager
def translate_peer_errors() -> Iterator[None]:
    """Raise PeerGone where a connection fails."""
    try:
        yield
    except (AuthenticationError, EOFError, OSError) as error:
        raise PeerGone from error


class ViewLink:
    """A connection between two processes of one machine."""

    def __init__(self, connection: Connection, pid: int) -> None:
        """`pid`: the process at the other end."""
        self._connection = connection
        # A process that was forked meanwhile may hold the other end open, so the end of the process
        # itself is watched, too. As a connection the descriptor is closed when nobody holds it.
        self._process = Connection(os.pidfd_open(pid), writable=False)

    def send(self, message: object) -> None:
        with translate_peer_errors():
            self._connection.send(message)

    def send_pickled(self, message: bytes) -> None:
        """Send what was pickled before. It can still be done while the interpreter ends."""
        try:
            self._connection.send_bytes(message)
        except OSError as error:
            raise PeerGone from error

    def receive(self) -> Any:
        """Wait for a message, as long as the other process lives."""
        self.wait()
        with translate_peer_errors():
            return self._connection.recv()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until there is a message, or the other side has hung up."""
        with translate_peer_errors():
            if self._connection not in wait([self._connection, self._process], seconds):
                raise PeerGone

    def has_message(self) -> bool:
        with translate_peer_errors():
            return self._connection.poll()

    def send_file(self, file: int) -> None:
        with translate_peer_errors():
            reduction.send_handle(self._connection, file, os.getpid())

    def receive_file(self) -> int:
        try:
            return reduction.recv_handle(self._connection)
        except (EOFError, OSError, RuntimeError) as error:
            raise PeerGone from error

    def close(self) -> None:
        """Hang up, even if a process that was forked meanwhile holds this end open, too."""
        shut(self._connection)
        self._connection.close()
        self._process.close()


def connect(address: ViewAddress, first: OpenView) -> ViewLink:
    """Connect to the process of a stream, and send `first`."""
    with translate_peer_errors():
        connection = Client(address.socket, "AF_UNIX")
        try:
            link = ViewLink(connection, address.pid)
            link.wait(GREETING_SECONDS)
            answer_challenge(connection, address.key)
            deliver_challenge(connection, address.key)
            link.send(first)
        except BaseException:
            connection.close()
            raise
    return link


def accept_consumer(connection: Connection, key: bytes) -> tuple[OpenView, ViewLink]:
    """Check that a consumer has the key; return its first message and the link to it."""
    with translate_peer_errors():
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        first = connection.recv()
        return first, ViewLink(connection, first.pid)


def missing_system_calls() -> list[str]:
    """Return the system calls that serving other processes needs and this system lacks."""
    return [name for name in ("memfd_create", "pidfd_open") if not hasattr(os, name)]


def check_machine() -> None:
    """Refuse to serve other processes where the system lacks what that takes."""
    if missing := missing_system_calls():
        raise SharingError(
            f"views for other processes need {' and '.join(missing)} of the system, which Linux has"
            " from 5.3 on: use view() in threads of one process"
        )
