"""What ends a fleet before its jobs have ended: Ctrl-C, or the end of its time.

Both are events like others: an exception could come between an event and its decision, and the
decision would be lost.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from trainers.fleet.deciding.events import Event, InterruptAsked, TimeTold


@contextmanager
def early_end(put: Callable[[Event], None], seconds: float | None) -> Iterator[list[int]]:
    """In this block let all jobs leave after the first Ctrl-C, which the yielded list has then, or
    after so many seconds. A second Ctrl-C is raised at once."""
    asked: list[int] = []

    def ask(number: int, _frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        put(InterruptAsked())

    wait = min(seconds or 0.0, threading.TIMEOUT_MAX)
    timer = threading.Timer(wait, lambda: put(TimeTold(seconds or 0.0)))
    timer.daemon = True
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, ask) if is_main else None
    if seconds is not None:
        timer.start()
    try:
        yield asked
    finally:
        timer.cancel()
        if is_main:
            signal.signal(signal.SIGINT, before)
