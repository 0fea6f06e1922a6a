"""Waiting for what another thread is about to do."""

import threading
from collections.abc import Callable

PATIENCE = 60.0


def eventually(holds: Callable[[], object]) -> None:
    """Wait until it holds; fail where it does not come about."""
    over = threading.Event()
    for _ in range(int(PATIENCE / 1e-3)):
        if holds():
            return
        over.wait(1e-3)
    raise AssertionError(f"it did not come about in {PATIENCE:g} s")
