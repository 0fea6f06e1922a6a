"""Waiting for what another thread is about to do."""

import threading
from collections.abc import Callable


def eventually(holds: Callable[[], object], seconds: float = 60.0) -> None:
    over = threading.Event()
    for _ in range(int(seconds * 1e3)):
        if holds():
            return
        over.wait(1e-3)
    raise AssertionError(f"it did not come about in {seconds:g} s")
