"""What the process of a device and the process that reads for all devices say to each other.

    device                            inputs
    OpenInput(label, loader)  ---->
                              <----   RemoteView, or why there is none
    AskLabel(label)           ---->
                              <----   the stream that it reads, "" if there is none
    LeaveInput(label)         ---->

The batches go from view to view: `loaders/sharing/view_link.py`.
"""

import logging
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    answer_challenge,
    deliver_challenge,
)
from typing import Any

from loaders import ReuseLoader
from loaders.sharing.remote_view import RemoteView
from trainers.dice import TorchSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InputAddress:
    """Where the process that reads for all devices is found."""

    socket: str
    key: bytes
    """Who has not got it is not let in."""


@dataclass(frozen=True, slots=True)
class OpenInput:
    label: str
    loader: bytes
    """Pickled."""
    settings: TorchSettings


@dataclass(frozen=True, slots=True)
class AskLabel:
    label: str


@dataclass(frozen=True, slots=True)
class LeaveInput:
    label: str


Request = OpenInput | AskLabel | LeaveInput


class InputLink:
    """One device's. Only the holder of the baton calls it. Where the other process has ended, or
    cannot be reached, the device reads by itself."""

    def __init__(self, address: InputAddress) -> None:
        self._address = address
        self._connection: Connection | None = None
        self._welcome = False
        """Whether both sides have shown that they have the key."""
        self._lost = False

    def wake(self) -> None:
        """Have the other process start, without waiting for it."""
        if self._connection is not None or self._lost:
            return
        try:
            self._connection = Client(self._address.socket, "AF_UNIX")
        except OSError as error:
            self._lose(error)

    def open(self, label: str, loader: ReuseLoader) -> RemoteView | None:
        """Return a view that serves what this loader would. None: it has to be read here."""
        try:
            pickled = pickle.dumps(loader)
        except Exception as error:  # whatever a class raises that is not made to be pickled
            log.warning("an input is read for one device only, as it cannot be sent: %s", error)
            return None
        self.wake()
        answer = self._ask(OpenInput(label, pickled, TorchSettings.now()))
        if isinstance(answer, str):
            log.warning("an input is read for one device only: %s", answer)
        return answer if isinstance(answer, RemoteView) else None

    def label(self, label: str) -> str:
        """Return the name of the stream that is read for this one; "" if there is none."""
        return self._ask(AskLabel(label)) or ""

    def leave(self, label: str) -> None:
        """Say that a stream of this process has ended."""
        self._say(LeaveInput(label))

    def close(self) -> None:
        connection, self._connection = self._connection, None
        self._lost = True
        if connection is not None:
            connection.close()

    def _ask(self, request: Request) -> Any:
        return self._do(lambda connection: (connection.send(request), connection.recv())[1])

    def _say(self, request: Request) -> None:
        self._do(lambda connection: connection.send(request))

    def _do(self, talk: Callable[[Connection], Any]) -> Any:
        if self._connection is None:
            return None
        try:
            if not self._welcome:
                answer_challenge(self._connection, self._address.key)
                deliver_challenge(self._connection, self._address.key)
                self._welcome = True
            return talk(self._connection)
        except (AuthenticationError, EOFError, OSError) as error:
            self._lose(error)
            return None

    def _lose(self, error: Exception) -> None:
        self.close()
        log.warning("the process that reads for all devices cannot be reached: %r", error)


def let_in(connection: Connection, key: bytes) -> None:
    """Let a device in that knows the key. Raise what `Connection` raises otherwise."""
    deliver_challenge(connection, key)
    answer_challenge(connection, key)
