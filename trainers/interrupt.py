"""Ctrl-C in the middle of a planned step waits until the trainer, too, is between two steps.

    step k running | Ctrl-C ......... update done | counters, hooks of step k | here   next batch
                     noted, nothing is torn apart                              KeyboardInterrupt

A planned step updates its first parameters while the backward pass of others still runs. Stopped
there, it would leave a model half way between two steps, in a checkpoint that says neither. A
second Ctrl-C does not wait.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Of one strategy."""

    def __init__(self) -> None:
        self._waits = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """While a step runs. Only Python's own main thread gets signals."""
        before = signal.getsignal(signal.SIGINT)
        main = threading.current_thread() is threading.main_thread()
        if not main or not callable(before) or self._waits:
            yield
            return
        signal.signal(signal.SIGINT, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._waits:
            self._waits = False
            raise KeyboardInterrupt
        self._waits = True

    def deliver(self) -> None:
        """Between two steps."""
        if self._waits:
            self._waits = False
            signal.raise_signal(signal.SIGINT)
