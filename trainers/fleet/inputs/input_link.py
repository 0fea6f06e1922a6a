"""The messages between the process of a device and the process that reads for all devices.

device                            inputs
OpenInput(label, loader)  ---->
                          <----   RemoteView, or the reason why there is none
AskLabel(label)           ---->
                          <----   the name of its stream, "" if there is none
LeaveInput(label)         ---->
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
from trainers.random_state import TorchSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InputAddress:
    """The address of the process that reads for all devices."""

    socket: str
    key: bytes
    """Clients must present it."""


@dataclass(frozen=True, slots=True)
class OpenInput:
    label: str
    loader: bytes
    settings: TorchSettings


@dataclass(frozen=True, slots=True)
class AskLabel:
    label: str


@dataclass(frozen=True, slots=True)
class LeaveInput:
    label: str


Request = OpenInput | AskLabel | LeaveInput


class InputLink:
    """One device's. Only the job with the baton calls it. If the other process has ended, or cannot
    be reached, the device reads by itself."""

    def __init__(self, address: InputAddress) -> None:
        self._address = address
        self._connection: Connection | None = None
        self._is_authenticated = False
        self._lost = False

    def start_process(self) -> None:
        """Let the other process start, without waiting for it."""
        if self._connection is not None or self._lost:
            return
        try:
            self._connection = Client(self._address.socket, "AF_UNIX")
        except OSError as error:
            self._lose(error)

    def open(self, label: str, loader: ReuseLoader) -> RemoteView | None:
        """Return a view that serves the batches of this loader; None if it must be read here."""
        try:
            pickled = pickle.dumps(loader)
        except Exception as error:  # any error of a class that cannot be pickled
            log.warning("an input is read for one device only, as it cannot be sent: %s", error)
            return None
        self.start_process()
        answer = self._ask(OpenInput(label, pickled, TorchSettings.current()))
        if isinstance(answer, str):
            log.warning("an input is read for one device only: %s", answer)
        return answer if isinstance(answer, RemoteView) else None

    def label(self, label: str) -> str:
        """Return the name of the other process's stream for this one; "" if there is none."""
        return self._ask(AskLabel(label)) or ""

    def leave(self, label: str) -> None:
        """Report that a stream of this process has ended."""
        self._call(lambda connection: connection.send(LeaveInput(label)))

    def close(self) -> None:
        connection, self._connection = self._connection, None
        self._lost = True
        if connection is not None:
            connection.close()

    def _ask(self, request: Request) -> Any:
        return self._call(lambda connection: (connection.send(request), connection.recv())[1])

    def _call(self, talk: Callable[[Connection], Any]) -> Any:
        if self._connection is None:
            return None
        try:
            if not self._is_authenticated:
                answer_challenge(self._connection, self._address.key)
                deliver_challenge(self._connection, self._address.key)
                self._is_authenticated = True
            return talk(self._connection)
        except (AuthenticationError, EOFError, OSError) as error:
            self._lose(error)
            return None

    def _lose(self, error: Exception) -> None:
        self.close()
        log.warning("the process that reads for all devices cannot be reached: %r", error)
