"""What a shared stream knows of its views: where each stands, whether it comes, and who waits."""

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from loaders.arguments import Serving
from loaders.errors import PassEnded, SharingError
from loaders.loader import ReuseLoader
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
        self._views = 0

    def add(self, follower: Follower) -> None:
        self._held.append(weakref.ref(follower))

    def living(self) -> list[Follower]:
        living = [follower for ref in self._held if (follower := ref()) is not None]
        if len(living) < len(self._held):
            self._held = [weakref.ref(follower) for follower in living]
        return living

    def new_name(self, name: str | None) -> str:
        """The name of a view that is made now. None: its number."""
        self._views += 1
        name = name or f"view {self._views}"
        if name in [follower.name for follower in self.living()]:
            raise SharingError(f"two views are called {name!r}: give each a name of its own")
        return name

    def marks(self) -> dict[str, Mark]:
        """Where those stand for which others wait, by their names."""
        return {f.name: f.standing.mark for f in self.living() if f.present}

    def present(self) -> list[Follower]:
        """Those for which others wait."""
        return [follower for follower in self.living() if follower.present]

    def precedences(self) -> list[Precedence]:
        """Those of all that take batches. Workers ask without a lock."""
        held = [ref() for ref in tuple(self._held)]
        return [f.precedence for f in held if f is not None and f.present and not f.holds_only]


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


def check_loader(loader: Any) -> None:
    """Refuse what a shared stream could not serve to each view as a lone loader would."""
    if not isinstance(loader, ReuseLoader):
        raise TypeError(
            f"SharedStream shares a ReuseLoader, not {type(loader).__name__}:"
            " ReuseLoader.from_dataloader(loader) makes one from a DataLoader"
        )
    if loader.state_dict()["stream"] is not None:
        raise SharingError(
            "the loader reads a stream, whose passes cannot be read by several at different places:"
            " give each consumer a loader of its own"
        )
    if loader.state_dict()["tuner"] is not None:
        raise SharingError(
            'reuse="auto" measures one training loop, but a shared stream has several: give a'
            " number"
        )
    device = loader.options.device
    if device is not None and str(device.to) != "cpu":
        raise SharingError(
            f"the loader sends its batches to {device.to}, but those of a shared stream wait on the"
            " host: leave device out, and let each consumer move its own batches"
        )


def pieces_for(loader: ReuseLoader, size: int, wanted: int | None) -> int:
    """Into how many pieces batches of `size` are cut for a view of `wanted`. None: whole ones."""
    wanted = size if wanted is None else wanted
    if wanted < 1 or size % wanted:
        fits = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
        raise SharingError(
            f"batch_size {wanted} does not divide {size}, the batch size of the shared loader: give"
            f" one of {fits}"
        )
    if size != wanted and loader.options.collate is not None:
        raise SharingError(
            f"the shared loader has a collate function, whose batches of {size} cannot be cut:"
            f" leave batch_size out, or share a loader with batch_size={wanted}"
        )
    return size // wanted


def check_other_thread(
    follower: Follower, names: tuple[str, ...], present: Sequence[Follower], window: int
) -> None:
    """Refuse to wait for a view that only the waiting thread itself could read."""
    same = [other.name for other in present if other.thread == follower.thread]
    if mine := [name for name in names if name in same]:
        raise SharingError(
            f"{follower.name} is {window} batches ahead of {mine[0]}, and one thread reads"
            f" both: take batches from {mine[0]} first, close it, or raise window"
        )


def stream_ended(why: str) -> PassEnded:
    """Return the error of a view that asks for a batch after the end."""
    return PassEnded(
        f"{why}: nothing is lost, state_dict() of a view says where it stands; make a"
        " new SharedStream, and load the states into its views"
    )
