"""`SharedStream` serves one loader to several consumers, each of which sees a loader of its own.

There is no thread here. Whoever needs a batch that was not read yet reads it, and keeps it for the
others; the loader's own workers make `lead` batches ahead of that. A batch is kept until every view
has taken it, and at most `window` are. Each view gets memory of its own.

The garbage collector may end a view on any thread and between any two lines, so what it calls takes
no lock of the stream: it replaces a view's standing, and rings. A view that reads alone also closes
its loader, whose own threads leave that to another thread (loaders/pipeline.py).
"""

import copy
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from loaders.arguments import PassPosition
from loaders.closing import ClosedAtEnd
from loaders.errors import PassEnded, SharingError, check_at_least_one, check_word
from loaders.loader import ReuseLoader
from loaders.sharing.batch_source import BatchSource, PassServing, SharedBatch, without_limit
from loaders.sharing.follower import (
    Follower,
    Followers,
    Standing,
    Waiters,
    check_loader,
    check_other_thread,
    pieces_for,
    stream_ended,
)
from loaders.sharing.kept_batches import Join, KeptBatches
from loaders.sharing.local_view import LocalView
from loaders.sharing.lockstep import Mark, ReadAlone, ReadNext, TakeKept, WaitFor
from loaders.sharing.remote_view import RemoteView
from loaders.sharing.view_server import ViewServer
from loaders.stats import LoaderStats
from loaders.workers.precedence import Precedence

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 10.0
"""After so long, and twice as long, ..., a log says who waits for whom."""


class SharedStream(ClosedAtEnd):
    """Many consumers of one `ReuseLoader`, which nobody else may iterate meanwhile."""

    def __init__(
        self, loader: ReuseLoader, lead: int = 4, window: int = 64, kept_bytes: int | None = None,
        source: BatchSource | None = None,
    ) -> None:  # fmt: skip
        """`lead` batches are made before the fastest view asks for them. The fastest view is at
        most `window` batches ahead of the slowest, and, but for one, `kept_bytes`. `source`: what
        reads instead of the loader."""
        check_at_least_one("lead", lead)
        check_at_least_one("window", window)
        check_loader(loader)
        loader.runner.made_ahead = lead
        self.loader = loader.apart()
        """A loader with the stream's arguments, which reads nothing itself."""
        self._source = source or BatchSource(loader)
        self._followers = Followers()
        loader.precedence = Precedence(self._followers.precedences)
        self._waiters = Waiters()
        first = without_limit(loader.position.next)
        self.kept = KeptBatches(self._followers, window, kept_bytes, first, self._waiters.ring)
        self._reader: Follower | None = None
        self._ended = ""
        self.decoded_alone: list[int] = []
        """What views have decoded by themselves."""
        self._lock = threading.Lock()
        self.reading = threading.Lock()
        """Held while a batch is read: a user's own code may draw from generators that all threads
        share, so only one batch is read at a time."""
        self._pid = os.getpid()
        self._server = ViewServer()

    # ---- for the user ---------------------------------------------------------------------------

    def view(
        self, batch_size: int | None = None, join: Join = "next pass", *, name: str | None = None
    ) -> LocalView:
        """A loader of its own for one consumer. docs/loader/sharing.md says what a late one sees.
        `batch_size` must divide that of the stream's loader. `name` is used where views wait."""
        check_word("join", join, ("next pass", "now"))
        self.check_process("a shared stream")
        with self._lock:
            self.check_open()
            name = self._followers.new_name(name)
            position, identity = self._find_start(join)
            size = position.serving.batch_size
            pieces = pieces_for(self.loader, size, batch_size)
            mark = (position.pass_index, position.served)
            standing = Standing(
                mark, without_limit(position.serving), without_limit(position.next), identity
            )
            follower = Follower(name, standing)
            self._followers.add(follower)
            is_late = self.kept.following is not None
        return LocalView(self, follower, position, pieces, is_late)

    def remote_view(
        self, batch_size: int | None = None, join: Join = "next pass", *, name: str | None = None
    ) -> RemoteView:
        """A `view` for a process of this machine. Send it there before it is used."""
        view = self.view(batch_size, join, name=name)
        return RemoteView(self._server.offer(view), view.facts)

    @property
    def stats(self) -> LoaderStats:
        """What was really done: a sample that was decoded once for all views counts once. What
        views decoded alone is part of `extra_decodes`."""
        stats = self._source.loader.stats
        with self._lock:
            kept = self.kept.nbytes
        extra = stats.extra_decodes + sum(self.decoded_alone)
        return replace(stats, extra_decodes=extra, batch_bytes=max(stats.batch_bytes, kept))

    @property
    def waited_for(self) -> dict[str, float]:
        """The seconds that views waited for each other view, by the name of that one."""
        return self._waiters.waited_for

    def close(self) -> None:
        """End the stream and its loader. The views keep their states."""
        with self._lock:
            self._ended = self._ended or "the shared stream was closed"
            self.kept.clear()
            reader = self._reader
            self._waiters.ring()
        if reader is None:
            self._source.leave()
        self._source.close()
        self._server.close()

    def __getstate__(self) -> dict[str, Any]:
        raise SharingError(
            "a shared stream cannot be copied or sent to another process, because its batches lie"
            " in this one: send its loader, and make a stream there"
        )

    # ---- for its views --------------------------------------------------------------------------

    def apart(self) -> ReuseLoader:
        """A loader for one view that reads alone."""
        return copy.copy(self.loader)

    @property
    def most_bytes(self) -> int:
        """The most that kept batches take, as far as batches were read."""
        return self.kept.most_bytes

    @property
    def sharers(self) -> int:
        """The number of views that share the stream's memory."""
        with self._lock:
            return max(1, sum(not f.holds_only for f in self._followers.present()))

    def follow(self, follower: Follower) -> None:
        """Take in a follower that comes from another stream, or that only holds batches."""
        with self._lock:
            self.check_open()
            self._followers.add(follower)

    def reaches(self, standing: Standing, member: Follower | None = None) -> bool:
        """Whether a view that stands there would go in step with the others. `member`: its own
        follower, if it is a view of this stream already."""
        with self._lock:
            return self.kept.can_serve(standing, member)

    def has_begun(self, number: int) -> bool:
        """Whether a pass was begun, and is not over for all views."""
        with self._lock:
            return number in self.kept.passes

    def in_earlier_pass(self, number: int) -> tuple[str, ...]:
        """The views that are in the middle of a pass before this one. Empty: it can begin."""
        with self._lock:
            if number in self.kept.passes or self.kept.following in (None, (number, 0)):
                return ()
            return tuple(f.name for f in self._followers.present() if f.standing.mark[0] < number)

    def ring(self) -> None:
        """Have all that wait look again. It takes no lock."""
        self._waiters.ring()

    def check_open(self) -> None:
        """Refuse to serve after the end."""
        if self._ended:
            raise stream_ended(self._ended)

    def check_process(self, who: str) -> None:
        """Refuse to be used in a forked process."""
        if os.getpid() != self._pid:
            raise SharingError(
                f"{who} belongs to process {self._pid}, and this is process {os.getpid()}, which"
                " has none of the threads that read: give it a ReuseLoader, which can load the"
                " state_dict() of a view"
            )

    def take(
        self, follower: Follower, after: Callable[[SharedBatch], Standing]
    ) -> tuple[SharedBatch | None, bool, float]:
        """Return the batch that this view takes next, whether it is its own now, and the seconds
        that it stalled. If it is not, it must be copied, and given back with `copied`. No batch:
        the view has to read alone. `after`: where it stands when it has the batch."""
        try:
            return self._take(follower, after)
        finally:
            if self._reader is follower:  # a Ctrl-C may strike before or after it reads
                self._stop_reading()

    def copied(self, batch: SharedBatch) -> None:
        """Note that a view has its copy."""
        with self._lock:
            batch.copying -= 1

    def _take(
        self, follower: Follower, after: Callable[[SharedBatch], Standing]
    ) -> tuple[SharedBatch | None, bool, float]:
        stalled, warn_after = 0.0, PATIENCE_SECONDS
        follower.comes()
        while True:
            with self._lock:
                self.check_open()
                action = self.kept.next_action(follower)
                if isinstance(action, ReadAlone):
                    return None, False, stalled
                if isinstance(action, TakeKept):
                    return *self.kept.hand_over(follower, after), stalled
                names = action.names if isinstance(action, WaitFor) else ()
                to_read = bell = None
                if isinstance(action, ReadNext) and self._reader is None:
                    self._reader = follower
                    to_read = self.kept.begin_reading(follower, action)
                elif follower.on_wait is None or not names:
                    check_other_thread(follower, names, self._followers.present(), self.kept.most)
                    bell = self._waiters.add_bell()
            if to_read is not None:
                stalled += self._read(*to_read)
            elif bell is not None:
                stalled += self._waiters.wait(bell, names)
                if names and stalled > warn_after:
                    warn_after *= 2
                    log.warning(
                        "%s has waited %.0f s for %s, which is %d batches behind: take its batches,"
                        " close it, or raise window",
                        follower.name, stalled, ", ".join(names), self.kept.most,
                    )  # fmt: skip
            elif follower.on_wait is not None:
                if follower.on_wait(names) is False:
                    return None, False, stalled
                follower.comes()  # others may have been told meanwhile not to wait for it

    # ---- reading and waiting (without the lock) -------------------------------------------------

    def _read(self, mark: Mark, wanted: PassServing) -> float:
        """Read the batch that follows, and return the seconds that the loader stalled."""
        try:
            with self.reading:
                batch = self._source.read(mark, wanted)
        except PassEnded as error:
            self._ended = self._ended or (
                "the loader of this shared stream was closed, or somebody else iterates it"
            )
            raise stream_ended(self._ended) from error
        with self._lock:
            if not self._ended:
                self.kept.add(batch, wanted)
        self._stop_reading()
        return batch.stall_seconds

    def _stop_reading(self) -> None:
        with self._lock:
            self._reader = None
            self._waiters.ring()

    def _find_start(self, join: Join) -> tuple[PassPosition, dict[str, str]]:
        """Where a new view begins."""
        position, identity = copy.copy(self.loader.position), self.loader.state_dict()["identity"]
        start = self.kept.find_start(join, identity)
        if start is None:
            if position.served and not position.resuming:
                position.end()  # somebody has left that pass in its middle
            return position, identity
        (number, served), known = start
        limit = position.next.pass_limit
        position.next = position.running = replace(known.serving, pass_limit=limit)
        position.pass_index, position.served, position.resuming = number, served, served > 0
        return position, known.identity
