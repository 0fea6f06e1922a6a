"""What tests that put several parts together share."""

import os
import select
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

Ended = Callable[[], bool]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Torch computes on one thread, as under `make test`: teams of threads add up in other orders,
    and on a busy machine they wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
