"""A Ctrl-C during a planned step is delivered after the step, when the trainer has counted it.

    step k running | Ctrl-C ......... update done | counters, hooks of step k | here   next batch
                     it is only noted                                          KeyboardInterrupt

A planned step updates its first parameters while the backward pass of other parameters still runs.
If it were stopped there, the model would be half way between two steps, and so would its
checkpoint. A second Ctrl-C during the same step is delivered at once.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class DelayedInterrupt:
    """Delays a Ctrl-C until the end of a step."""

    def __init__(self) -> None:
        self._waits = False

    @contextmanager
    def delay(self) -> Iterator[None]:
        """Note a Ctrl-C in this block instead of raising it. Only the main thread gets signals."""
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
        """Raise the signal that was noted, if there was one. The caller is between two steps."""
        if self._waits:
            self._waits = False
            signal.raise_signal(signal.SIGINT)
