"""`SharedStream` serves one loader to several consumers, each of which sees a loader of its own.

    stream = SharedStream(ReuseLoader(...))
    view_a, view_b = stream.view(), stream.view()        each to a model, in a thread of its own

There is no thread here. Whoever needs a batch that was not read yet reads it, and keeps it for the
others; the loader's own workers make `lead` batches ahead of that. A batch is kept until every view
has taken it, and at most `window` are. Each view gets memory of its own.

The garbage collector may end a view on any thread and between any two lines, so what it calls takes
no lock: it replaces a view's standing, and rings.
"""

import copy
import logging
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from time import perf_counter
from typing import Any, Literal

from loaders.arguments import at_least_one, one_of
from loaders.errors import PassEnded, SharingError
from loaders.loader import ReuseLoader
from loaders.pass_position import PassPosition
from loaders.sharing.batch_source import BatchSource, PassServing, SharedBatch, whole
from loaders.sharing.follower import Follower, Standing
from loaders.sharing.lockstep import (
    Action,
    Mark,
    ReadAlone,
    ReadNext,
    TakeKept,
    WaitFor,
    next_action,
    oldest_needed,
)
from loaders.sharing.shareable import check_loader, pieces_for
from loaders.sharing.shared_view import SharedView
from loaders.stats import LoaderStats

log = logging.getLogger(__name__)

Join = Literal["next pass", "now"]
LOOK_SECONDS = 0.2
"""Whoever waits looks so often whether a view has gone without saying so."""
PATIENCE_SECONDS = 10.0
"""After so long, and twice as long, ..., a log says who waits for whom."""


class SharedStream:
    """Many consumers of one `ReuseLoader`, which nobody else may iterate meanwhile."""

    def __init__(self, loader: ReuseLoader, lead: int = 4, window: int = 64) -> None:
        """`lead` batches are made before the fastest view asks for them. The fastest view is at
        most `window` batches ahead of the slowest."""
        at_least_one("lead", lead)
        at_least_one("window", window)
        check_loader(loader)
        loader.made_ahead = lead
        self.window = window
        self._loader = loader
        self._prototype = loader.apart()
        self._source = BatchSource(loader)
        self._kept: dict[Mark, SharedBatch] = {}
        self._following: Mark | None = None
        self._passes: dict[int, PassServing] = {}
        """Of the passes that were begun and are not over for all views."""
        self._followers: list[weakref.ref[Follower]] = []
        self._views = 0
        self._latest = whole(loader.position.next)
        """How the pass is served that was begun last."""
        self._reader: Follower | None = None
        self._ended = ""
        self._waiting: set[threading.Lock] = set()
        """The bells of those that wait: each waits by locking its own again."""
        self._waited_for: dict[str, float] = {}
        self._decoded_alone: list[int] = []
        self._lock = threading.Lock()
        self._one_reads = threading.Lock()
        self._pid = os.getpid()

    # ---- for the user ---------------------------------------------------------------------------

    def view(
        self, batch_size: int | None = None, join: Join = "next pass", *, name: str | None = None
    ) -> SharedView:
        """A loader of its own for one consumer. docs/loader.md says what a late one sees.
        `batch_size` must divide that of the stream's loader. `name` is used where views wait."""
        one_of("join", join, ("next pass", "now"))
        self.check_process("a shared stream")
        with self._lock:
            self.check_open()
            self._views += 1
            name = name or f"view {self._views}"
            if name in [follower.name for follower in self._all_followers()]:
                raise SharingError(f"two views are called {name!r}: give each a name of its own")
            position, identity = self._joining(join)
            size = position.serving.batch_size
            pieces = pieces_for(self._loader, size, size if batch_size is None else batch_size)
            mark = (position.pass_index, position.served)
            standing = Standing(mark, whole(position.serving), whole(position.next), identity)
            follower = Follower(name, standing)
            self._followers.append(weakref.ref(follower))
            is_late = self._following is not None
        return SharedView(self, follower, position, pieces, is_late)

    @property
    def stats(self) -> LoaderStats:
        """What was really done: a sample that was decoded once for all views counts once. What
        views decoded alone is part of `extra_decodes`."""
        stats = self._loader.stats
        with self._lock:
            kept = sum(batch.nbytes for batch in self._kept.values())
        extra = stats.extra_decodes + sum(self._decoded_alone)
        return replace(stats, extra_decodes=extra, batch_bytes=max(stats.batch_bytes, kept))

    @property
    def waited_for(self) -> dict[str, float]:
        """The seconds that views waited for each other view, by the name of that one."""
        with self._lock:
            return dict(self._waited_for)

    def close(self) -> None:
        """End the stream and its loader. The views keep their states."""
        with self._lock:
            self._ended = self._ended or "the shared stream was closed"
            self._kept.clear()
            reader = self._reader
            self.ring()
        if reader is None:
            self._source.leave()
        self._loader.close()

    def __enter__(self) -> "SharedStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        raise SharingError(
            "a shared stream cannot be copied or sent to another process, because its batches lie"
            " in this one: send its loader, and make a stream there"
        )

    # ---- for its views --------------------------------------------------------------------------

    @property
    def loader(self) -> ReuseLoader:
        """A loader with the stream's arguments, which reads nothing itself."""
        return self._prototype

    def apart(self) -> ReuseLoader:
        """A loader for one view that reads alone."""
        return copy.copy(self._prototype)

    def reading(self) -> AbstractContextManager[Any]:
        """Held while a batch is read: a user's own code may draw from generators that all threads
        share, so only one batch is read at a time."""
        return self._one_reads

    def count_alone(self, decodes: int) -> None:
        """Count what a view has decoded by itself. It takes no lock."""
        self._decoded_alone.append(decodes)

    @property
    def sharers(self) -> int:
        """The number of views that share the stream's memory."""
        with self._lock:
            return max(1, len(self._present()))

    def ring(self) -> None:
        """Have everybody who waits look again. It takes no lock."""
        for bell in tuple(self._waiting):
            with suppress(RuntimeError):  # somebody else has rung
                bell.release()

    def check_open(self) -> None:
        """Refuse to serve after the end."""
        if self._ended:
            raise self._end_error()

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
            bell = threading.Lock()
            with self._lock:
                self.check_open()
                action = self._action(follower)
                if isinstance(action, ReadAlone):
                    return None, False, stalled
                if isinstance(action, TakeKept):
                    return *self._hand_over(follower, after), stalled
                names = action.names if isinstance(action, WaitFor) else ()
                to_read = None
                if isinstance(action, ReadNext) and self._reader is None:
                    to_read = self._begin_reading(follower, action)
                elif follower.on_wait is None or not names:
                    self._check_other_thread(follower, names)
                    bell.acquire()
                    self._waiting.add(bell)
            if to_read is not None:
                stalled += self._read(*to_read)
            elif follower.on_wait is not None and names:
                follower.on_wait(names)
            else:
                stalled += self._wait(bell, names)
                if names and stalled > warn_after:
                    warn_after *= 2
                    log.warning("%s", self._who_waits(follower.name, names, stalled))

    # ---- who is where (under the lock) ----------------------------------------------------------

    def _all_followers(self) -> list[Follower]:
        followers = [follower for ref in self._followers if (follower := ref()) is not None]
        if len(followers) < len(self._followers):
            self._followers = [weakref.ref(follower) for follower in followers]
        return followers

    def _present(self) -> list[Follower]:
        return [follower for follower in self._all_followers() if follower.present]

    def _action(self, follower: Follower) -> Action:
        standing = follower.standing
        known = self._passes.get(standing.mark[0])
        if known is not None and known.serving != standing.serving:
            return ReadAlone()
        marks = {one.name: one.standing.mark for one in self._present()}
        self._drop_taken(marks)
        return next_action(follower.name, marks, list(self._kept), self._following, self.window)

    def _drop_taken(self, marks: dict[str, Mark]) -> None:
        """Drop the batches that no view needs any more."""
        needed = oldest_needed(marks.values(), list(self._kept), self._following)
        taken = [mark for mark in self._kept if needed is None or mark < needed]
        for mark in taken:
            del self._kept[mark]
        if taken:
            self.ring()
        oldest = next(iter(self._kept), self._following)
        for number in [n for n in self._passes if oldest is not None and n < oldest[0]]:
            del self._passes[number]

    def _hand_over(
        self, follower: Follower, after: Callable[[SharedBatch], Standing]
    ) -> tuple[SharedBatch, bool]:
        oldest, batch = next(iter(self._kept)), self._kept[follower.standing.mark]
        follower.standing = after(batch)
        marks = {one.name: one.standing.mark for one in self._present()}
        needed = any(oldest <= mark <= batch.mark for mark in marks.values())
        is_own = not needed and batch.copying == 0
        batch.copying += not is_own
        self._drop_taken(marks)
        return batch, is_own

    def _begin_reading(self, follower: Follower, action: ReadNext) -> tuple[Mark, PassServing]:
        """Return what is to be read, and for whose pass."""
        if action.begin is not None:
            self._kept.clear()
            self._passes.clear()
            self._following = action.begin
        mark = self._following
        assert mark is not None
        self._reader = follower
        wanted = self._passes.get(mark[0])
        if wanted is None:
            standings = [follower.standing, *(one.standing for one in self._present())]
            here = [one for one in standings if one.mark[0] == mark[0]]
            wanted = self._passes[mark[0]] = (here or standings)[0].of_pass(mark[0])
            self._latest = wanted.serving
        return mark, wanted

    def _check_other_thread(self, follower: Follower, names: tuple[str, ...]) -> None:
        same = [one.name for one in self._present() if one.thread == follower.thread]
        if mine := [name for name in names if name in same]:
            raise SharingError(
                f"{follower.name} is {self.window} batches ahead of {mine[0]}, and one thread reads"
                f" both, so it would wait for itself: take batches from {mine[0]} first, close it,"
                " or raise window"
            )

    # ---- reading and waiting (without the lock) -------------------------------------------------

    def _read(self, mark: Mark, wanted: PassServing) -> float:
        """Read the batch that follows, and return the seconds that the loader stalled."""
        try:
            with self._one_reads:
                batch = self._source.read(mark, wanted)
        except PassEnded as error:
            self._ended = self._ended or (
                "the loader of this shared stream was closed, or somebody else iterates it"
            )
            raise self._end_error() from error
        with self._lock:
            if not self._ended:
                self._kept[mark], self._following = batch, batch.following
                if batch.following[0] == mark[0]:
                    self._passes[mark[0]] = replace(wanted, identity=batch.identity)
        self._stop_reading()
        return batch.stall_seconds

    def _stop_reading(self) -> None:
        with self._lock:
            self._reader = None
            self.ring()

    def _wait(self, bell: threading.Lock, names: tuple[str, ...]) -> float:
        """Wait until something has changed, and return the seconds."""
        begun = perf_counter()
        try:
            bell.acquire(timeout=LOOK_SECONDS)
        finally:
            self._waiting.discard(bell)
        seconds = perf_counter() - begun
        with self._lock:
            for name in names:
                self._waited_for[name] = self._waited_for.get(name, 0.0) + seconds
        return seconds

    def _who_waits(self, name: str, names: tuple[str, ...], seconds: float) -> str:
        return (
            f"{name} has waited {seconds:.0f} s for {', '.join(names)}, which is"
            f" {self.window} batches behind: take its batches, close it, or raise window"
        )

    # ---- joining and ending ---------------------------------------------------------------------

    def _joining(self, join: Join) -> tuple[PassPosition, dict[str, str]]:
        """Return where a new view begins."""
        position, identity = self._prototype.position, self._prototype.state_dict()["identity"]
        position, following = copy.copy(position), self._following
        if following is None:
            if position.served and not position.resuming:
                position.end()  # somebody has left that pass in its middle
            return position, identity
        self._drop_taken({one.name: one.standing.mark for one in self._present()})
        if join == "now":
            number, served = next(iter(self._kept), following)
        else:
            later = following[0] + (following[1] > 0)
            starts = (mark for mark in self._kept if mark[1] == 0)
            number, served = next(starts, (later, 0))
        known = self._passes.get(number)
        serving = self._latest if known is None else known.serving
        limit = position.next.pass_limit
        position.next = position.running = replace(serving, pass_limit=limit)
        position.pass_index, position.served, position.resuming = number, served, served > 0
        return position, known.identity if known is not None else identity

    def _end_error(self) -> PassEnded:
        return PassEnded(
            f"{self._ended}: nothing is lost, state_dict() of a view says where it stands; make a"
            " new SharedStream, and load the states into its views"
        )
