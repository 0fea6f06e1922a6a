"""Those that wait for the other views of a stream, and how long they did."""

import threading
from contextlib import suppress
from time import perf_counter

LOOK_SECONDS = 0.2
"""Whoever waits looks so often whether a view has gone without saying so."""


class Waiters:
    """One stream's. `ring` takes no lock."""

    def __init__(self) -> None:
        self._bells: set[threading.Lock] = set()
        self._waited_for: dict[str, float] = {}
        self._lock = threading.Lock()

    @property
    def waited_for(self) -> dict[str, float]:
        """The seconds that views waited for each other view, by the name of that one."""
        with self._lock:
            return dict(self._waited_for)

    def bell(self) -> threading.Lock:
        """Return a bell that rings from now on. Wait for it with `wait`."""
        bell = threading.Lock()
        bell.acquire()
        self._bells.add(bell)
        return bell

    def ring(self) -> None:
        """Have everybody who waits look again."""
        for bell in tuple(self._bells):
            with suppress(RuntimeError):  # somebody else has rung
                bell.release()

    def wait(self, bell: threading.Lock, names: tuple[str, ...]) -> float:
        """Wait for these views until something has changed, and return the seconds."""
        begun = perf_counter()
        try:
            bell.acquire(timeout=LOOK_SECONDS)
        finally:
            self._bells.discard(bell)
        seconds = perf_counter() - begun
        with self._lock:
            for name in names:
                self._waited_for[name] = self._waited_for.get(name, 0.0) + seconds
        return seconds
