"""Wakes up a thread that waits. Nothing here blocks but `wait`."""

import threading
from contextlib import suppress


class Bell:
    """One thread waits for it; any thread may ring, also the garbage collector's."""

    def __init__(self) -> None:
        self._silent = threading.Lock()
        """It is locked unless somebody rang. `wait` locks it again."""
        self._silent.acquire()

    def reset(self) -> None:
        """Forget that somebody rang."""
        self._silent.acquire(blocking=False)

    def ring(self) -> None:
        with suppress(RuntimeError):  # somebody else has rung
            self._silent.release()

    def wait(self, seconds: float = -1) -> bool:
        """Wait until somebody rings, or for so many seconds. Return whether somebody rang."""
        return self._silent.acquire(timeout=seconds)
