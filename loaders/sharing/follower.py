"""What a shared stream knows of its views: where each stands, whether it comes, and who waits."""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

from loaders.arguments import Serving
from loaders.sharing.batch_source import Identity, PassServing
from loaders.sharing.lockstep import Mark
from loaders.workers.precedence import Bell, Precedence

OnWait = Callable[[tuple[str, ...]], bool | None]
"""Is called with the names of those that are waited for. False: the view does not wait."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a view stands in the stream. It is replaced as one, so every thread may read it."""

    mark: Mark
    """The batch that it takes next. While it reads alone: the beginning of its next pass."""
    serving: Serving
    """How the pass of this batch is served for it."""
    later: Serving
    """How the passes after that one are served for it."""
    identity: Identity

    def of_pass(self, number: int) -> PassServing:
        """Return how this view wants a pass to be served."""
        return PassServing(self.serving if number <= self.mark[0] else self.later, self.identity)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Follower:
    """One view as the stream sees it."""

    name: str
    standing: Standing
    thread: int | None = None
    """The thread that took a batch last. None: no batch was taken yet."""
    lives: Callable[[], bool] | None = None
    """Tells whether that thread has not ended."""
    away: bool = False
    """Whether the view was closed. It comes back when it is used again."""
    on_wait: OnWait | None = None
    holds_only: bool = False
    """Whether it takes nothing: it holds batches for views that may come."""
    precedence: Precedence = field(default_factory=Precedence)
    """Whether the consumer of the view gives way to those of other loaders."""

    @property
    def present(self) -> bool:
        """Whether others wait for it. Nobody waits for a thread that has ended."""
        return not self.away and (self.lives is None or self.lives())

    def comes(self) -> None:
        """Note that this thread takes batches for the view."""
        self.thread, self.lives = threading.get_ident(), threading.current_thread().is_alive
        self.away = False


class Followers:
    """The followers of one stream, as long as their views are held."""

    def __init__(self) -> None:
        self._held: list[weakref.ref[Follower]] = []

    def add(self, follower: Follower) -> None:
        self._held.append(weakref.ref(follower))

    def living(self) -> list[Follower]:
        found = [follower for ref in self._held if (follower := ref()) is not None]
        if len(found) < len(self._held):
            self._held = [weakref.ref(follower) for follower in found]
        return found

    def present(self) -> list[Follower]:
        """Those for which others wait."""
        return [follower for follower in self.living() if follower.present]

    def precedences(self) -> list[Precedence]:
        """Those of all that take batches. Workers ask without a lock."""
        found = [ref() for ref in tuple(self._held)]
        return [f.precedence for f in found if f is not None and f.present and not f.holds_only]


LOOK_SECONDS = 0.2
"""Whoever waits looks so often whether a view has gone without saying so."""


class Waiters:
    """One stream's. `ring` takes no lock."""

    def __init__(self) -> None:
        self._bells: set[Bell] = set()
        self._waited_for: dict[str, float] = {}
        self._lock = threading.Lock()

    @property
    def waited_for(self) -> dict[str, float]:
        """The seconds that views waited for each other view, by the name of that one."""
        with self._lock:
            return dict(self._waited_for)

    def add_bell(self) -> Bell:
        """Return a bell that rings from now on. Wait for it with `wait`."""
        bell = Bell()
        self._bells.add(bell)
        return bell

    def ring(self) -> None:
        """Have everybody who waits look again."""
        for bell in tuple(self._bells):
            bell.ring()

    def wait(self, bell: Bell, names: tuple[str, ...]) -> float:
        """Wait for these views until something has changed, and return the seconds."""
        begun = perf_counter()
        try:
            bell.wait(LOOK_SECONDS)
        finally:
            self._bells.discard(bell)
        seconds = perf_counter() - begun
        with self._lock:
            for name in names:
                self._waited_for[name] = self._waited_for.get(name, 0.0) + seconds
        return seconds
