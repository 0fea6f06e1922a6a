"""`LocalView`: a view in the process of its stream.

    shared pass   take, take, take ...                  of the stream
    alone         a loader of its own, until the pass ends, from the same place

What the other views do decides whether a batch was read for all or by this view alone.
"""

import copy
import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from loaders.arguments import PassPosition, Serving
from loaders.errors import SharingError, StateError
from loaders.sharing.batch_source import (
    BatchSource,
    Identity,
    PassServing,
    SharedBatch,
    without_limit,
)
from loaders.sharing.follower import Follower, OnWait, Standing
from loaders.sharing.lockstep import Mark
from loaders.sharing.shared_view import SharedView, ViewFacts, ViewPlace, replaced_iterator
from loaders.sharing.view_batches import BatchCopies, batch_of_piece, cut_batch, is_pinned
from loaders.stats import BatchInfo, LoaderStats
from loaders.workers.precedence import Precedence

if TYPE_CHECKING:
    from loaders.sharing.shared_stream import SharedStream

log = logging.getLogger(__name__)


class LocalView(SharedView):
    """`SharedStream.view` makes it."""

    def __init__(
        self,
        stream: "SharedStream",
        follower: Follower,
        position: PassPosition,
        pieces: int,
        is_late: bool,
    ) -> None:
        """`position` counts batches of the stream; each is cut into `pieces` of the view's.
        `is_late`: its counters begin with 0, and not with those of the loader."""
        loader = stream.loader
        super().__init__(ViewFacts.from_loader(follower.name, pieces, loader), loader.dataset)
        self.last_batch: BatchInfo | None = None
        self._position = _times(position, pieces)
        self.stream = stream
        self.follower = follower
        """What the stream knows of this view."""
        self._iteration: object | None = None
        self._pending: deque[tuple[Any, BatchInfo]] = deque()
        self._batches = 0
        """The number of batches in the pass that is iterated."""
        self._alone: BatchSource | None = None
        self._failed = False
        """Whether the first batch of this pass could not be read: then the next try is alone."""
        begun = LoaderStats.from_state(self.facts.constants["stats"])
        self._stats = LoaderStats() if is_late else begun
        self._copies: BatchCopies | None = None
        self.on_pass: Callable[[], None] | None = None
        """Called before the first batch that an iterator takes: the view may move then."""

    # ---- what a training loop uses --------------------------------------------------------------

    @property
    def on_wait(self) -> OnWait | None:
        """Called instead of waiting for other views, with their names; then the view looks again.
        For consumers that take turns: it should return when the others have had a turn. If it
        returns False, the view reads the rest of the pass alone."""
        return self.follower.on_wait

    @on_wait.setter
    def on_wait(self, call: OnWait | None) -> None:
        self.follower.on_wait = call

    @property
    def precedence(self) -> Precedence:
        """`behind`: the stream gives way to other loaders while all its views do."""
        return self.follower.precedence

    def __iter__(self) -> Iterator[Any]:
        self.stream.check_process(self.name)
        # A generator starts nothing before the first next(), and leaving the loop closes it.
        return self._serve_pass()

    @property
    def stats(self) -> LoaderStats:
        """What this view was served. Of the stream's memory it counts an equal share."""
        stats, sharers = self.stream.stats, self.stream.sharers
        memory = {
            "buffer_bytes": stats.buffer_bytes // sharers,
            "batch_bytes": stats.batch_bytes // sharers,
            "cache_bytes": stats.cache_bytes // sharers,
        }
        if self._copies is not None:
            memory["batch_bytes"] += self._copies.nbytes
        if self._alone is not None:
            alone = self._alone.loader.stats
            memory = {name: memory[name] + alone[name] for name in memory}
        return replace(self._stats, **memory)

    def set_reuse(
        self, reuse: int, *, reaugment: bool | None = None, batch_size: int | None = None
    ) -> None:
        asked = self.stream.apart()
        asked.set_reuse(
            reuse,
            reaugment=self.reaugment if reaugment is None else reaugment,
            batch_size=(batch_size or self.batch_size) * self.pieces,
        )
        self._set_next(replace(asked.position.next, pass_limit=self.position.next.pass_limit))

    def limit_pass(self, batches: int | None) -> None:
        self._set_next(replace(self.position.next, pass_limit=batches))

    def close(self) -> None:
        self._leave()
        self._copies = None  # the memory that waits to be used again
        self.rest()

    def rest(self) -> None:
        """Have nobody wait for this view until it takes its next batch. An open iterator goes on
        then, alone if the others are too far by that time."""
        self.follower.away = True
        self.stream.ring()

    def move_to(self, stream: "SharedStream") -> None:
        """Be a view of another stream of the same arguments, from the next iterator on."""
        self._leave()
        old = self.follower
        self.rest()
        self.follower = replace(old, away=False)
        self.stream = stream
        stream.follow(self.follower)

    def __getstate__(self) -> dict[str, Any]:
        raise SharingError(
            f"{self.name} of a shared stream cannot be copied or sent to another process, because"
            " its batches lie in this one: give that process a remote_view() of the stream, or a"
            " ReuseLoader, which can load the view's state_dict()"
        )

    def state_dict(self) -> dict[str, Any]:
        return self.place.state(self.facts.constants, self.pieces)

    @property
    def position(self) -> PassPosition:
        return self._position

    @property
    def place(self) -> ViewPlace:
        """Where its consumer is."""
        identity = self.follower.standing.identity
        return ViewPlace(copy.copy(self.position), identity, self._stats, self.last_batch)

    def leave_at(self, place: ViewPlace) -> None:
        """Leave the pass as a consumer does that was served what there was up to `place`."""
        self._position = replace(place.position, next=self.position.next)
        self._stats, self.last_batch = place.counters, place.last_batch
        self._leave()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("pieces", 1) != self.pieces:
            raise StateError(
                f"the saved state counts batches cut into {state.get('pieces', 1)} pieces, this"
                f" view cuts them into {self.pieces}: make the view with the batch_size it had"
            )
        position = PassPosition.from_state(state)
        full, _ = self._in_batches(position)
        checked = self.stream.apart()
        checked.load_state_dict(
            {key: value for key, value in state.items() if key != "pieces"}
            | {"served_batches": full}
        )
        self._leave()
        self._position, self._failed = position, False
        self._stats = LoaderStats.from_state(state["stats"])
        self._set_standing(
            full, position.serving, state.get("identity", self.facts.constants["identity"])
        )

    def _serve_pass(self) -> Iterator[Any]:
        self._leave()  # another iterator may have been left open
        if self.on_pass is not None:
            self.on_pass()
        self._batches = len(self)
        at = self.position
        at.begin()
        token = self._iteration = object()
        try:
            self._set_standing(self._in_batches(at)[0], at.running)
            if self._failed:
                self._read_alone("its first batch could not be read before")
            for served in range(at.served, self._batches):
                batch = self._next_batch(token)
                at.served = served + 1
                if at.served == self._batches:
                    at.end()
                    self._leave()
                yield batch
        finally:
            if self._iteration is token:
                self._leave()

    def _next_batch(self, token: object) -> Any:
        self.stream.check_process(self.name)
        self.stream.check_open()
        if self._iteration is not token:
            raise replaced_iterator(self.name)
        if not self._pending:
            self._pending.extend(self._take_pieces())
        batch, self.last_batch = self._pending.popleft()
        return batch

    def _take_pieces(self) -> list[tuple[Any, BatchInfo]]:
        """Take a batch of the stream, and return those of its pieces that come next."""
        shared, is_own, stalled = None, True, 0.0
        if self._alone is None:
            shared, is_own, stalled = self.stream.take(self.follower, self._standing_after)
            if shared is None:
                self._read_alone("it cannot wait, or the stream is elsewhere or serves otherwise")
        if shared is None:
            shared = self._read()
            stalled += shared.stall_seconds
        _, skipped = self._in_batches(self.position)
        self._failed = shared.error is not None and not self.position.served
        if shared.error is not None:
            raise shared.error
        assert shared.info is not None
        batch = shared.batch if is_own else self._copy(shared)
        if not skipped:  # else the counters of the loaded state have it
            self._stats = _counted(self._stats, shared)
        self._stats = replace(self._stats, stall_seconds=self._stats.stall_seconds + stalled)
        if self.pieces == 1:
            return [(batch, shared.info)]
        size = self.position.running.batch_size // self.pieces
        return cut_batch(batch, shared.info, self.pieces, size)[skipped:]

    def _standing_after(self, shared: SharedBatch) -> Standing:
        """Return where this view stands when it has taken this batch."""
        mark, at = shared.following, self.position
        if shared.info is not None and mark[1]:
            _, skipped = self._in_batches(at)
            pieces = -(-len(shared.info.ids) * self.pieces // at.running.batch_size)
            if at.served - skipped + pieces >= self._batches:  # the view ends its passes early
                mark = (mark[0] + 1, 0)
        serving = at.running if mark[0] == at.pass_index else at.next
        return Standing(mark, without_limit(serving), without_limit(at.next), shared.identity)

    def _copy(self, shared: SharedBatch) -> Any:
        try:
            copies = self._copies
            if copies is None:
                copies = self._copies = BatchCopies(is_pinned(shared.batch))
            return copies.copy(shared.batch)
        finally:
            self.stream.copied(shared)

    def _read_alone(self, why: str) -> None:
        at = self.position
        loader = self.stream.apart()
        loader.precedence = self.precedence
        self._alone = BatchSource(loader)
        self.follower.away = False
        self.follower.standing = self._standing((at.pass_index + 1, 0), at.next)
        self.stream.ring()
        log.warning(
            "%s reads pass %d alone from batch %d on, and decodes it once more: %s",
            self.name, at.pass_index, at.served, why,
        )  # fmt: skip

    def _read(self) -> SharedBatch:
        assert self._alone is not None
        at = self.position
        mark = (at.pass_index, self._in_batches(at)[0])
        wanted = PassServing(without_limit(at.running), self.follower.standing.identity)
        with self.stream.reading:
            shared = self._alone.read(mark, wanted)
        standing = self.follower.standing
        self.follower.standing = replace(standing, identity=shared.identity)
        return shared

    def _standing(self, mark: Mark, serving: Serving, identity: Identity | None = None) -> Standing:
        identity = self.follower.standing.identity if identity is None else identity
        return Standing(mark, without_limit(serving), without_limit(self.position.next), identity)

    def _in_batches(self, at: PassPosition) -> tuple[int, int]:
        """The batch of the stream that a position is in, and how many pieces of it are served."""
        if not at.served:
            return 0, 0
        share = self.stream.loader.share
        return batch_of_piece(at.served, share, at.running, self.pieces, self.mode)

    def _set_standing(self, batch: int, serving: Serving, identity: Identity | None = None) -> None:
        """Tell the stream that this view comes for batch `batch` of its pass."""
        mark = (self.position.pass_index, batch)
        self.follower.standing = self._standing(mark, serving, identity)

    def _set_next(self, serving: Serving) -> None:
        self.position.next = serving
        standing, at = self.follower.standing, self.position
        coming = standing.mark[0] > at.pass_index or not (self._iteration or at.resuming)
        current = serving if coming else standing.serving
        self.follower.standing = self._standing(standing.mark, current)

    def _leave(self) -> None:
        """Stop a pass that was not served to its end. The garbage collector may call it."""
        self._iteration = None
        self._pending.clear()
        alone, self._alone = self._alone, None
        if alone is not None:
            alone.leave()
            alone.loader.close()
            self.stream.decoded_alone.append(alone.decodes)
        at = self.position
        if not at.resuming and at.served:
            mark, serving = (at.pass_index + 1, 0), at.next
        else:
            mark, serving = (at.pass_index, self._in_batches(at)[0]), at.serving
        self.follower.standing = self._standing(mark, serving)
        self.stream.ring()


def _times(position: PassPosition, pieces: int) -> PassPosition:
    """Return a position that counts pieces, made of one that counts batches."""

    def limited(serving: Serving) -> Serving:
        limit = serving.pass_limit
        return replace(serving, pass_limit=None if limit is None else limit * pieces)

    running, following = limited(position.running), limited(position.next)
    served = position.served * pieces
    return replace(position, running=running, next=following, served=served)


def _counted(stats: LoaderStats, shared: SharedBatch) -> LoaderStats:
    """Return the counters with those of one more batch."""
    before, after, begins = shared.before, shared.after, shared.mark[1] == 0
    assert shared.info is not None
    counted = stats.with_batch(
        shared.info,
        after.cached - before.cached,
        after.serve_seconds - before.serve_seconds,
        after.ages.total - (0 if begins else before.ages.total),
        begins,
    )
    decode_seconds = stats.decode_seconds + after.decode_seconds - before.decode_seconds
    return replace(counted, decode_seconds=decode_seconds)
