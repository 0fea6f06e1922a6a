"""What every test gets: a leak police, and small data sets."""

import gc
import threading
import time
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    """A decode thread that outlives its test is a leak."""
    yield
    gc.collect()
    deadline = time.monotonic() + 5
    while leaked := [t for t in threading.enumerate() if t.name.startswith("perfect-")]:
        if time.monotonic() > deadline:
            pytest.fail(f"leaked threads: {[t.name for t in leaked]}")
        leaked[0].join(0.1)
