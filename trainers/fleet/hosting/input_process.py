"""The process that reads for all devices of a fleet, if several have processes of their own.

    fleet's process                              device
    listens, and starts the process        <---  connects when the first job could share its input
    process: accepts, a thread for each    <-->  InputLink

A fleet whose jobs share nothing has no such process. If it dies, the devices read on by themselves.
"""

import multiprocessing
import os
import socket
import threading
from multiprocessing.connection import Connection, wait

from loaders.sharing.view_link import missing_system_calls
from trainers.fleet.hosting.child_manners import ChildManners
from trainers.fleet.inputs.input_link import InputAddress
from trainers.fleet.inputs.input_service import InputService

BACKLOG = 128


class InputProcess:
    """A context manager."""

    def __init__(self) -> None:
        name = f"\0perfect-inputs-{os.getpid()}-{os.urandom(8).hex()}"
        self.address = InputAddress(name, os.urandom(32))
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(name)
        self._listener.listen(BACKLOG)
        self._bell, self._clapper = multiprocessing.Pipe(duplex=False)
        self._process = multiprocessing.get_context("spawn").Process(
            target=_serve,
            args=(self._listener, self.address.key, ChildManners.of_this_process()),
            name="perfect-inputs",
            daemon=False,  # its loaders may have processes of their own
        )
        self._starter = threading.Thread(
            target=self._start, name="perfect-inputs-start", daemon=True
        )

    def _start(self) -> None:
        """Start the process when the first device knocks."""
        if self._bell not in wait([self._listener, self._bell]):
            self._process.start()
        self._listener.close()  # with it closed here, its death is seen by all

    def __enter__(self) -> "InputProcess":
        self._starter.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._clapper.close()
        self._starter.join()
        self._bell.close()
        if self._process.ident is not None:
            self._process.kill()  # it has nothing to lose
            self._process.join()


def reads_for_all(in_processes: bool, devices: int) -> bool:
    """Whether there are processes that could read together."""
    return in_processes and devices > 1 and not missing_system_calls()


def _serve(listener: socket.socket, key: bytes, manners: ChildManners) -> None:
    """Run in the process. It ends with that of the fleet."""
    manners.adopt()
    service, fleet = InputService(), multiprocessing.parent_process()
    assert fleet is not None
    while fleet.sentinel not in wait([listener, fleet.sentinel]):
        peer, _ = listener.accept()
        connection = Connection(peer.detach())
        threading.Thread(target=service.attend, args=(connection, key), daemon=True).start()
    service.close()
