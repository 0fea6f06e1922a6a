"""The process that reads for all devices of a fleet, if each has a process of its own.

    fleet's process                              device
    listens, and starts the process        <---  connects when the first job could share its input
    process: accepts, a thread for each    <-->  InputLink

It starts only if jobs share their input. If it dies, the devices read on by themselves.
"""

import multiprocessing
import os
import socket
import threading
from multiprocessing.connection import Connection, wait

from loaders.sharing.view_link import missing_system_calls
from trainers.fleet.hosting.child_settings import ChildSettings
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
        self._stop_reader, self._stop_writer = multiprocessing.Pipe(duplex=False)
        self._process = multiprocessing.get_context("spawn").Process(
            target=_serve,
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


def _serve(listener: socket.socket, key: bytes, child: ChildSettings) -> None:
    """Run in the process. It ends with that of the fleet."""
    child.apply()
    service, fleet = InputService(), multiprocessing.parent_process()
    assert fleet is not None
    while fleet.sentinel not in wait([listener, fleet.sentinel]):
        peer, _ = listener.accept()
        connection = Connection(peer.detach())
        threading.Thread(target=service.serve_device, args=(connection, key), daemon=True).start()
    service.close()
