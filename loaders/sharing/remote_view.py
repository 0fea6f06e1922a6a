"""`RemoteView`: a view of a shared stream for another process of the same machine.

    process of the stream                        process of a model
    view = stream.remote_view() --- pickled ---> for batch in view: ...     opens itself when used

Until it is used it is a few words, which can be sent. Then what its training loop sees, and the
state it saves, are those of a `LocalView`. What was sent ahead is not served yet.

    stream of this process -> RemoteSource -> RemoteView .... stream of another process
                                          '-> the loader itself, where that one is gone or fails

With a `RemoteSource` several processes read one loader together. What another process cannot give
is read here, from the same batch on, and an error of the data set is raised here.
"""

import copy
import logging
import os
import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from loaders.arguments import PassPosition
from loaders.errors import PassEnded, SharingError
from loaders.loader import ReuseLoader
from loaders.sharing.batch_source import BatchSource, PassServing, SharedBatch
from loaders.sharing.lent_blocks import BorrowedBlocks
from loaders.sharing.lockstep import Mark
from loaders.sharing.shared_view import SharedView, ViewFacts, ViewPlace, replaced_iterator
from loaders.sharing.view_link import (
    Answered,
    BeginPass,
    LeavePass,
    OpenView,
    PeerGone,
    Served,
    TookBatch,
    ViewAddress,
    ViewCall,
    connect,
)
from loaders.stats import BatchInfo, LoaderStats


@dataclass(frozen=True, slots=True)
class SamplesElsewhere:
    """Stands for the data set, which is in the process of the stream."""

    number: int

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> Any:
        raise SharingError(
            f"sample {index} cannot be read here, because the data set of a remote view is in the"
            " process of its stream: take batches, or open the data set in this process, too"
        )


class ServerLink:
    """An open link to the process of the stream, and what came over it for the training loop."""

    def __init__(self, address: ViewAddress, opening: OpenView) -> None:
        self._link = connect(address, opening)
        self.pid = opening.pid
        """The process that has opened it."""
        self.blocks = BorrowedBlocks()
        self.pending: deque[Served] = deque()
        self._sending = threading.Lock()  # held while something is sent

    def send(self, message: object) -> None:
        """Send a message. If nobody is there, waiting for the answer will show it."""
        with self._sending, suppress(PeerGone):
            self._link.send(message)

    def send_unless_busy(self, message: bytes) -> None:
        """Send what was pickled before. The garbage collector may call this, also while something
        is sent: then nothing is sent here."""
        if os.getpid() != self.pid or not self._sending.acquire(blocking=False):
            return
        try:
            with suppress(PeerGone):
                self._link.send_pickled(message)
        finally:
            self._sending.release()

    def receive(self) -> Any:
        message = self._link.receive()
        if isinstance(message, Served) and message.shipment is not None:
            file = self._link.receive_file() if message.shipment.new_bytes > 0 else None
            self.blocks.receive(message.shipment, file)
        return message

    def keep(self, served: Served, pass_number: int) -> None:
        """Keep what was served for this pass, and drop what was served for another one."""
        if served.pass_number == pass_number:
            self.pending.append(served)
        elif served.shipment is not None:
            self.blocks.leave(served.shipment)

    def close(self) -> None:
        self._link.close()


class RemoteView(SharedView):
    """`SharedStream.remote_view` makes it."""

    def __init__(self, address: ViewAddress, facts: ViewFacts) -> None:
        super().__init__(facts, SamplesElsewhere(facts.constants["samples"]))
        self.last_batch: BatchInfo | None = None
        self._address = address
        self._place: ViewPlace | None = None
        """Where its training loop is. None: it was not opened yet."""
        self._memory: dict[str, int] = {}
        self._link: ServerLink | None = None
        self._pass_number = 0
        self._leaving = b""
        """The pickled message that the pass is left."""
        self._iteration: object | None = None
        self._conversation = threading.Lock()  # held by the thread that asks and gets an answer

    # ---- what a training loop uses --------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        self._check_process()
        # A generator starts nothing before the first next(), and leaving the loop closes it.
        return self._serve_pass()

    @property
    def stats(self) -> LoaderStats:
        """What this view was served. Its memory is in the process of the stream."""
        return replace(self._current_place.counters, **self._memory)

    def set_reuse(
        self, reuse: int, *, reaugment: bool | None = None, batch_size: int | None = None
    ) -> None:
        self._set_next("set_reuse", reuse, reaugment=reaugment, batch_size=batch_size)

    def limit_pass(self, batches: int | None) -> None:
        self._set_next("limit_pass", batches)

    def state_dict(self) -> dict[str, Any]:
        return self._current_place.state(self.facts.constants, self.pieces)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._conversation:
            place, _ = self._call("load_state_dict", state)
            self._iteration = None
            self._drop_pending(self._open())
            self._place = place

    def close(self) -> None:
        """A view that was never used here is taken out of the stream, unless another process has
        opened it. One that was used goes on where it stands, when it is used again."""
        if self._link is not None and os.getpid() != self._link.pid:
            return  # this is a fork of the process that uses it
        with self._conversation:
            if self._link is not None:
                self._hang_up()
            elif self._place is None:
                with suppress(PeerGone):
                    # Who has opened it and goes is not waited for.
                    connect(self._address, OpenView(self.name, os.getpid(), None)).close()

    def __reduce__(self) -> tuple[Any, ...]:
        if self._link is not None:
            raise SharingError(
                f"{self.name} is open in process {self._link.pid}, so it cannot be copied or sent"
                " to another one: send it before it is used, or close() it before it is sent"
            )
        return RemoteView, (self._address, self.facts)

    def _serve_pass(self) -> Iterator[Any]:
        token = object()
        with self._conversation:
            link, place = self._open(), self._current_place
            position = copy.copy(place.position)
            position.begin()
            self._drop_pending(link)
            link.send(BeginPass(self._pass_number, link.blocks.returned()))
            self._place, self._iteration = replace(place, position=position), token
        try:
            over = False
            while not over:
                batches, over = self._next_batch(token)
                while batches:
                    yield batches.pop()  # not held here: its memory is used again
        finally:
            if self._iteration is token:
                self._leave()

    def _next_batch(self, token: object) -> tuple[list[Any], bool]:
        """Return the batch, or none in an empty pass, and whether the pass is over."""
        with self._conversation:
            self._check_process()
            link = self._link
            if link is None or self._iteration is not token:
                raise replaced_iterator(self.name)
            begun = perf_counter()
            while not link.pending:
                link.keep(self._receive(link), self._pass_number)
            served = link.pending.popleft()
            stalled = perf_counter() - begun
            shipment = served.shipment
            batches = [] if shipment is None else [link.blocks.open(shipment)]
            self._note_served(served, stalled)
            over = shipment is None or not served.place.position.served
            if over:
                self._iteration = None
            link.send(TookBatch(link.blocks.returned()))
            if served.failure is not None:
                raise served.failure.error(self._server)
            return batches, over

    def _note_served(self, served: Served, stalled: float) -> None:
        """Note that the training loop has this. What it wished meanwhile was not known there."""
        before, place = self._current_place, served.place
        position = replace(place.position, next=before.position.next)
        seconds = before.counters.stall_seconds + stalled
        counters = replace(place.counters, stall_seconds=seconds)
        self._place = replace(place, position=position, counters=counters)
        self._memory, self.last_batch = {**served.memory}, place.last_batch

    def _leave(self) -> None:
        """Send that the pass is left. The garbage collector may call this. Where nothing can be
        sent now, the next pass sends it when it begins."""
        self._iteration, link = None, self._link
        if link is not None:
            link.send_unless_busy(self._leaving)

    def _drop_pending(self, link: ServerLink) -> None:
        """Forget what was sent for the pass before, and what is still sent for it."""
        self._pass_number += 1
        self._leaving = pickle.dumps(LeavePass(self._pass_number))
        while link.pending:
            link.keep(link.pending.popleft(), self._pass_number)

    # ---- the other process ----------------------------------------------------------------------

    @property
    def position(self) -> PassPosition:
        """Where the training loop is. Nobody changes it."""
        return self._current_place.position

    @property
    def _server(self) -> str:
        return f"process {self._address.pid}, which has the shared stream"

    @property
    def _current_place(self) -> ViewPlace:
        """Where the training loop is. The first who asks opens the view."""
        if self._place is None:
            with self._conversation:
                self._open()
        assert self._place is not None
        return self._place

    def _check_process(self) -> None:
        if self._link is not None and os.getpid() != self._link.pid:
            raise SharingError(
                f"{self.name} was opened by process {self._link.pid}, and this is process"
                f" {os.getpid()}: give each process a remote_view() of its own, before it is used"
            )

    def _open(self) -> ServerLink:
        self._check_process()
        if self._link is not None:
            return self._link
        opening = OpenView(self.name, os.getpid(), self._place)
        try:
            link = self._link = ServerLink(self._address, opening)
        except PeerGone as error:
            raise self._stream_lost() from error
        try:
            self._place, self._memory = self._answer(link)
            self.last_batch = self._place.last_batch
        except BaseException:
            self._hang_up()
            raise
        return link

    def _call(self, method: str, *arguments: Any, **options: Any) -> tuple[ViewPlace, Any]:
        link = self._open()
        link.send(ViewCall(method, arguments, options))
        return self._answer(link)

    def _set_next(self, method: str, *arguments: Any, **options: Any) -> None:
        with self._conversation:
            there, _ = self._call(method, *arguments, **options)
            assert self._place is not None
            position = replace(self._place.position, next=there.position.next)
            self._place = replace(self._place, position=position)

    def _answer(self, link: ServerLink) -> tuple[ViewPlace, dict[str, int]]:
        """Return where the view is there."""
        while not isinstance(message := self._receive(link), Answered):
            link.keep(message, self._pass_number)
        if message.failure is not None:
            raise message.failure.error(self._server)
        assert message.place is not None
        return message.place, {**message.memory}

    def _receive(self, link: ServerLink) -> Any:
        try:
            return link.receive()
        except PeerGone as error:
            self._hang_up()
            raise self._stream_lost() from error
        except BaseException:
            # A Ctrl-C may have come within a message. Whoever uses the view again opens it again.
            self._hang_up()
            raise

    def _hang_up(self) -> None:
        link, self._link = self._link, None
        self._iteration = None
        if link is not None:
            link.close()

    def _stream_lost(self) -> PassEnded:
        lost = "nothing is lost, state_dict() of this view says where it stands; "
        return PassEnded(
            f"process {self._address.pid}, which has the shared stream of {self.name}, has closed"
            f" it or has ended: {lost if self._place else ''}make a new SharedStream, and load the"
            " state into a view of it"
        )


log = logging.getLogger(__name__)


class RemoteSource(BatchSource):
    """One stream's."""

    def __init__(self, loader: ReuseLoader, open_view: Callable[[], RemoteView | None]) -> None:
        """`open_view` is called before the first batch. It returns a view that serves what
        `loader` would serve, or None if there is none."""
        super().__init__(loader)
        self._own = loader
        self._open_view: Callable[[], RemoteView | None] | None = open_view
        self._closed = False

    @property
    def is_remote(self) -> bool:
        """Whether another process reads for this one."""
        return self.loader is not self._own

    def read(self, mark: Mark, wanted: PassServing) -> SharedBatch:
        open_view, self._open_view = self._open_view, None
        view = None if open_view is None else open_view()
        if view is not None:
            self.loader = view
        if not self.is_remote:
            return super().read(mark, wanted)
        try:
            batch = super().read(mark, wanted)
            if batch.error is None:
                return batch
            error = batch.error
        except Exception as raised:
            error = raised
        if self._closed:
            raise error
        log.warning("pass %d is read in this process from batch %d on: %s", *mark, error)
        gone, self.loader = self.loader, self._own
        self.leave()
        gone.close()
        return super().read(mark, wanted)

    def close(self) -> None:
        self._closed = True
        super().close()
        if self.is_remote:
            self._own.close()
