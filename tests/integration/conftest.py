"""What tests of worker processes share."""

import os
import select
from collections.abc import Callable, Iterator
from typing import Any

import pytest

Ended = Callable[[], bool]


@pytest.fixture
def watch() -> Iterator[Callable[[int | None], Ended]]:
    """`ended = watch(pid)` while it lives; `ended()` waits for its end, whoever its parent is."""
    if not hasattr(os, "pidfd_open"):
        pytest.skip("watches processes as Linux does")
    handles: set[int] = set()

    def start(pid: int | None) -> Ended:
        assert pid
        handle = os.pidfd_open(pid)
        handles.add(handle)

        def ended() -> bool:
            handles.remove(handle)
            try:
                return bool(select.select([handle], [], [], 40)[0])
            finally:
                os.close(handle)

        return ended

    yield start
    for handle in handles:
        os.close(handle)


@pytest.fixture(scope="session")
def nursery() -> Iterator[Any]:
    """Forks the processes of swarms. It imports for seconds, once."""
    from benchmarks.swarms.swarm import Nursery

    with Nursery() as nursery:
        assert nursery.tasks == 1, "a process with several threads must not be forked"
        yield nursery
