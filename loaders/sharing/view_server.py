"""Serves views of a shared stream to other processes of this machine.

    listener thread   accepts consumers
    a thread each     LocalView -> pack -> blocks of shared memory -> the consumer

Each consumer is a few batches ahead of its training loop. What counts is what the loop was served:
`taken`. When the consumer leaves its pass, or dies, its view goes back to that.
"""

import copy
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from loaders.errors import LoaderError, SharingError
from loaders.sharing.lent_blocks import LentBlocks, PackedBatch, pack
from loaders.sharing.local_view import LocalView
from loaders.sharing.shared_view import ViewPlace
from loaders.sharing.view_link import (
    AHEAD,
    Answered,
    BeginPass,
    LeavePass,
    OpenView,
    PeerGone,
    Served,
    TookBatch,
    ViewAddress,
    ViewCall,
    ViewLink,
    accept_consumer,
    check_machine,
)
from loaders.stats import MEMORY
from loaders.workers.child_process import shut
from loaders.workers.worker import Failure

log = logging.getLogger(__name__)

BACKLOG = 128
"""This many consumers may connect at the same moment."""
BUSY_SECONDS = 5.0
"""So long the next consumer of a view waits until the one before it has gone."""
END_SECONDS = 5.0
LOOK_SECONDS = 0.2
"""The time until the next try to accept a consumer, where there are too many open files, say."""


class ViewDesk:
    """A view, and who has it open."""

    def __init__(self, view: LocalView) -> None:
        self.view = view
        self.taken = view.place
        """Where its consumer is. It may be behind the view."""
        self.pid: int | None = None
        self.busy = threading.Lock()


class ViewSession:
    """Serves one consumer, until it goes."""

    def __init__(self, desk: ViewDesk, link: ViewLink) -> None:
        self._desk = desk
        self._view = desk.view
        self._link = link
        self._blocks = LentBlocks()
        self._batches: Iterator[Any] | None = None
        self._pass_number = 0
        self._sent: deque[ViewPlace] = deque()
        """What was sent and not taken yet."""

    def begin(self, place: ViewPlace | None) -> None:
        """Go where the consumer stood before."""
        if place is not None:
            self._desk.taken = place
            self._view.leave_at(place)
        self._send_place()

    def run(self) -> None:
        """Serve until the consumer has gone."""
        try:
            while True:
                may_send = self._batches is not None and len(self._sent) < AHEAD
                if may_send and not self._link.has_message():
                    self._serve()
                else:
                    self._do(self._link.receive())
        except PeerGone:
            with suppress(PeerGone):
                while self._link.has_message():  # what it sent before it closed the link
                    self._do(self._link.receive())
        finally:
            self._settle()

    def _settle(self) -> None:
        """Bring the view back to where its consumer is."""
        is_ahead = self._batches is not None or len(self._sent) > 0
        self._batches = None
        self._sent.clear()
        if is_ahead:
            self._view.leave_at(self._desk.taken)

    def _do(self, message: object) -> None:
        """Do what the consumer says."""
        match message:
            case BeginPass(number, returned):
                self._blocks.take_back(returned)
                self._settle()
                position = copy.copy(self._view.position)
                position.begin()
                self._desk.taken = replace(self._desk.taken, position=position)
                self._pass_number, self._batches = number, iter(self._view)
            case TookBatch(returned):
                self._blocks.take_back(returned)
                self._desk.taken = self._sent.popleft()
            case LeavePass(number):
                if number == self._pass_number:
                    self._settle()
            case ViewCall():
                self._call(message)
            case _:
                raise TypeError(f"a view cannot be asked for {message!r}")

    def _call(self, call: ViewCall) -> None:
        try:
            getattr(self._view, call.method)(*call.arguments, **call.options)
        except Exception as error:
            self._link.send(Answered(None, {}, Failure.from_error(error)))
            return
        if call.method == "load_state_dict":
            self._batches = None
            self._sent.clear()
            self._desk.taken = self._view.place
        self._send_place()

    def _send_place(self) -> None:
        self._link.send(Answered(self._view.place, self._memory))

    def _serve(self) -> None:
        assert self._batches is not None
        packed: PackedBatch | None = None
        failure: Failure | None = None
        try:
            batch = next(self._batches)
        except StopIteration:
            pass  # The pass is over. The consumer learns it from an answer without a batch.
        except BaseException as error:
            failure = Failure.from_error(error)
        else:
            try:
                packed = pack(batch)
            except LoaderError as error:
                # The view has given this batch, but its consumer does not get it.
                self._view.leave_at(self._sent[-1] if self._sent else self._desk.taken)
                failure = Failure.from_error(error)
        place = self._view.place
        if packed is None or not place.position.served:  # an error, or the pass is over
            self._batches = None
        self._sent.append(place)
        shipment, file = (None, None) if packed is None else self._blocks.ship(packed)
        try:
            self._link.send(Served(self._pass_number, place, self._memory, shipment, failure))
            if file is not None:
                self._link.send_file(file)
        finally:
            if file is not None:
                os.close(file)

    @property
    def _memory(self) -> dict[str, int]:
        stats = self._view.stats
        memory = {name: stats[name] for name in MEMORY}
        memory["batch_bytes"] += self._blocks.nbytes
        return memory


class ViewServer:
    """Accepts consumers, from the first view that is offered."""

    def __init__(self) -> None:
        self._desks: dict[str, ViewDesk] = {}
        self._connections: set[Connection] = set()
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None
        self._address = f"\0perfect-{os.getpid()}-{os.urandom(8).hex()}"
        self._key = os.urandom(32)
        self._closed = False
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def offer(self, view: LocalView) -> ViewAddress:
        """Serve a view, and return where it can be opened."""
        with self._lock:
            if self._listener is None:
                check_machine()
                self._listener = socket.socket(socket.AF_UNIX)
                self._listener.bind(self._address)
                self._listener.listen(BACKLOG)
                self._start(self._accept_consumers, "perfect-views", self._listener)
            self._desks[view.name] = ViewDesk(view)
        return ViewAddress(self._address, self._key, self._pid, view.name)

    def withdraw(self, name: str) -> None:
        """Serve a view no longer. Its consumer must have gone, or be about to."""
        desk = self._desks.pop(name, None)
        if desk is not None and desk.busy.acquire(timeout=BUSY_SECONDS):
            desk.busy.release()

    def close(self) -> None:
        """Hang up on all consumers. It is safe to call this again, and in a forked process."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed, listener, self._listener = True, self._listener, None
            connections, threads = [*self._connections], self._threads
        if listener is not None:
            listener.shutdown(socket.SHUT_RDWR)  # this wakes its thread
        for connection in connections:
            shut(connection)
        for thread in threads:
            thread.join(END_SECONDS)

    # ---- the threads ----------------------------------------------------------------------------

    def _start(self, run: Any, name: str, *arguments: Any) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=run, args=arguments, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept_consumers(self, listener: socket.socket) -> None:
        with listener:
            while not self._closed:
                try:
                    peer, _ = listener.accept()
                except OSError as error:
                    if not self._closed:
                        log.warning("a consumer of a shared stream cannot be accepted: %s", error)
                        threading.Event().wait(LOOK_SECONDS)
                    continue
                with self._lock:
                    connection = Connection(peer.detach())
                    if self._closed:
                        connection.close()
                        return
                    self._connections.add(connection)
                    self._start(self._attend, "perfect-view", connection)

    def _attend(self, connection: Connection) -> None:
        """Serve a consumer that has connected, if it has the key."""
        try:
            asked, link = accept_consumer(connection, self._key)
            with closing(link):
                self._open(asked, link)
        except PeerGone as gone:
            log.debug("a consumer of a shared stream has gone: %r", gone.__cause__)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _open(self, asked: OpenView, link: ViewLink) -> None:
        desk = self._desks.get(asked.name)
        if desk is None:  # it was withdrawn
            return
        if not desk.busy.acquire(timeout=BUSY_SECONDS):
            busy = SharingError(
                f"{asked.name} is open in process {desk.pid} already, and a view has one consumer:"
                " make a remote_view() for each process, or close() it there first"
            )
            link.send(Answered(None, {}, Failure.from_error(busy)))
            return
        try:
            desk.pid = asked.pid
            session = ViewSession(desk, link)
            session.begin(asked.place)
            session.run()
        finally:
            desk.view.close()
            desk.pid = None
            desk.busy.release()
