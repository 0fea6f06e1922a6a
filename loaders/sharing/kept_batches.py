"""The batches of a shared stream that were read, and are kept until every view has taken them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from loaders.arguments import Serving
from loaders.sharing.batch_source import Identity, PassServing, SharedBatch
from loaders.sharing.follower import Follower, Followers, Standing
from loaders.sharing.lockstep import (
    Action,
    Mark,
    ReadAlone,
    ReadNext,
    is_in_reach,
    next_action,
    oldest_needed,
)

Join = Literal["next pass", "now"]


class KeptBatches:
    """At most `window` batches, one after the other. The lock of the stream protects them."""

    def __init__(
        self, followers: Followers, window: int, kept_bytes: int | None, serving: Serving,
        ring: Callable[[], None],
    ) -> None:  # fmt: skip
        """`serving`: of the first pass. `ring` is called when room was made for another batch."""
        self.window = window
        self._followers = followers
        self._kept_bytes = kept_bytes
        self._largest = 1
        self._ring = ring
        self._batches: dict[Mark, SharedBatch] = {}
        self.following: Mark | None = None
        """The batch after the last one. None: the stream may begin anywhere."""
        self.passes: dict[int, PassServing] = {}
        """Of the passes that were begun and are not over for all views."""
        self._latest = serving
        """How the pass is served that was begun last."""

    @property
    def most(self) -> int:
        """How many batches may be kept."""
        fit = self.window if self._kept_bytes is None else self._kept_bytes // self._largest
        return max(1, min(self.window, fit))

    @property
    def most_bytes(self) -> int:
        """The most that kept batches take, as far as batches were read."""
        return self.most * self._largest

    @property
    def nbytes(self) -> int:
        return sum(batch.nbytes for batch in self._batches.values())

    def clear(self) -> None:
        self._batches.clear()

    def can_serve(self, standing: Standing, member: Follower | None) -> bool:
        """Whether a view that stands there would go in step with the others. `member`: its own
        follower, if it is a view of this stream already."""
        if self._is_served_otherwise(standing):
            return False
        others = [f.standing.mark for f in self._followers.present() if f is not member]
        place = list(self._batches), self.following, self.most, member is not None
        return is_in_reach(standing.mark, others, *place)

    def next_action(self, follower: Follower) -> Action:
        """What this view does next."""
        if self._is_served_otherwise(follower.standing):
            return ReadAlone()
        marks = self._followers.marks()
        self._drop_taken(marks)
        return next_action(follower.name, marks, list(self._batches), self.following, self.most)

    def hand_over(
        self, follower: Follower, after: Callable[[SharedBatch], Standing]
    ) -> tuple[SharedBatch, bool]:
        """Take a batch for a view; returns it, and whether it is its own now. `after`: where the
        view stands then."""
        oldest, batch = next(iter(self._batches)), self._batches[follower.standing.mark]
        follower.standing = after(batch)
        marks = self._followers.marks()
        needed = any(oldest <= mark <= batch.mark for mark in marks.values())
        is_own = not needed and batch.copying == 0
        batch.copying += not is_own
        self._drop_taken(marks)
        return batch, is_own

    def begin_reading(self, follower: Follower, action: ReadNext) -> tuple[Mark, PassServing]:
        """Return what is to be read, and for whose pass."""
        if action.begin is not None:
            self._batches.clear()
            self.passes.clear()
            self.following = action.begin
        mark = self.following
        assert mark is not None
        wanted = self.passes.get(mark[0])
        if wanted is None:
            standings = [follower.standing, *(f.standing for f in self._followers.present())]
            here = [standing for standing in standings if standing.mark[0] == mark[0]]
            wanted = self.passes[mark[0]] = (here or standings)[0].of_pass(mark[0])
            self._latest = wanted.serving
        return mark, wanted

    def add(self, batch: SharedBatch, wanted: PassServing) -> None:
        """Keep a batch that was read, for a pass that is served as `wanted`."""
        number = batch.mark[0]
        self._batches[batch.mark], self.following = batch, batch.following
        self._largest = max(self._largest, batch.nbytes)
        if batch.following[0] == number:
            self.passes[number] = replace(wanted, identity=batch.identity)

    def find_start(self, join: Join, identity: Identity) -> tuple[Mark, PassServing] | None:
        """Where a new view begins, and how its pass is served. None: the stream has not begun.
        `identity`: of a pass that was not begun."""
        if self.following is None:
            return None
        self._drop_taken(self._followers.marks())
        if join == "now":
            mark = next(iter(self._batches), self.following)
        else:
            later = self.following[0] + (self.following[1] > 0)
            mark = next((mark for mark in self._batches if mark[1] == 0), (later, 0))
        return mark, self.passes.get(mark[0]) or PassServing(self._latest, identity)

    def _is_served_otherwise(self, standing: Standing) -> bool:
        """Whether its pass was begun with other settings than it asks for."""
        known = self.passes.get(standing.mark[0])
        return known is not None and known.serving != standing.serving

    def _drop_taken(self, marks: dict[str, Mark]) -> None:
        """Drop the batches that no view needs any more."""
        needed = oldest_needed(marks.values(), list(self._batches), self.following)
        taken = [mark for mark in self._batches if needed is None or mark < needed]
        for mark in taken:
            del self._batches[mark]
        if taken:
            self._ring()
        oldest = next(iter(self._batches), self.following)
        for number in [n for n in self.passes if oldest is not None and n < oldest[0]]:
            del self.passes[number]
