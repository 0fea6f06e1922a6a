"""Reads for all devices of a fleet that have processes of their own.

    device 0: jobs a, b -- stream 0.1 --.                 a loader is decoded once for all devices,
    device 1: jobs c, d -- stream 1.1 --+-- stream all.1  as long as they stay together

No device waits for another one, which may be slow, or may train a job that reads something else. A
stream that is more than the window behind reads on alone until its next pass.
"""

import pickle
import threading
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import ParamSpec, TypeVar

from loaders.errors import SharingError
from loaders.sharing.remote_view import RemoteView
from loaders.sharing.view_server import ViewServer
from trainers.fleet.inputs.input_link import AskLabel, LeaveInput, OpenInput, Request
from trainers.fleet.inputs.shared_inputs import SharedInputs
from trainers.random_state import TorchSettings

P = ParamSpec("P")
R = TypeVar("R")


class InputService:
    """One fleet's. Each device is served in a thread of its own."""

    def __init__(self) -> None:
        self._inputs = SharedInputs("all")
        self._views = ViewServer()
        self._settings: TorchSettings | None = None
        self._lock = threading.RLock()

    def serve_device(self, connection: Connection, key: bytes) -> None:
        """Serve one device until it disconnects."""
        opened: set[str] = set()
        try:
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            while True:
                request: Request = connection.recv()
                match request:
                    case OpenInput(label):
                        opened.add(label)
                        connection.send(self._open(request))
                    case AskLabel(label):
                        with self._lock:
                            connection.send(self._inputs.label(label))
                    case LeaveInput(label):
                        opened.discard(label)
                        self._leave(label)
        except (AuthenticationError, EOFError, OSError):
            pass  # the device has disconnected
        finally:
            for label in opened:
                self._leave(label)
            connection.close()

    def close(self) -> None:
        self._views.close()
        with self._lock:
            self._inputs.close()

    def _open(self, request: OpenInput) -> RemoteView | str:
        """Return a view for a device, or the reason why it has to read by itself."""
        with self._lock:
            if self._settings is None:
                request.settings.apply()
                self._settings = request.settings
            if request.settings != self._settings:
                return f"its settings of torch are different: {request.settings}"
            try:
                loader = pickle.loads(request.loader)
                view = self._inputs.view(request.label, loader, None, self._rest)
                assert view.on_pass is not None and view.on_wait is not None
                view.on_pass = self._under_lock(view.on_pass)
                view.on_wait = self._under_lock(view.on_wait)
                return RemoteView(self._views.offer(view), view.facts)
            except SharingError as error:
                return str(error)
            except Exception as error:  # any error of a class that cannot be pickled
                return f"it cannot be rebuilt in another process: {error!r}"

    def _under_lock(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return the function so that one thread calls it at a time."""

        def locked(*args: P.args, **kwargs: P.kwargs) -> R:
            with self._lock:
                return function(*args, **kwargs)

        return locked

    def _rest(self, labels: tuple[str, ...]) -> bool:
        """Let nobody wait for these streams."""
        self._inputs.rest(labels)
        return True

    def _leave(self, label: str) -> None:
        self._views.withdraw(label)
        with self._lock:
            self._inputs.leave(label)
