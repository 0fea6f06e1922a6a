"""What tests that put several parts together share."""

import functools
import multiprocessing
import os
import select
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import accelerators
from support.shared_streams import BATCHES, lone
from support.wire_ends import LOOPBACK, SECRET, Pair

from loaders import SharedStream
from offload.live.core import why_no_core
from trainers import OffloadStrategy
from trainers.elastic.wire.listener import Listener, connect

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
def core() -> None:
    """The core of live steps, which is compiled when it is asked for the first time."""
    if why := why_no_core():
        pytest.skip(why)


@pytest.fixture(autouse=True)
def same_determinism() -> Iterator[None]:
    """`Trainer(deterministic=True)` tells all of torch, and takes that back nowhere."""
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(autouse=True)
def accelerator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the trainers of the test are, for which it may be parametrized (accelerators.py)."""
    chosen = getattr(request, "param", accelerators.CPU)
    if chosen == accelerators.GPU:
        # An update on the host has other last bits than one on a GPU (docs/offload/gpu.md).
        on_device = functools.partialmethod(OffloadStrategy.__init__, optimizer="device")
        monkeypatch.setattr(OffloadStrategy, "__init__", on_device)
    with accelerators.trainers_on(chosen):
        yield chosen


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


@pytest.fixture
def nothing_left_at_once() -> Iterator[None]:
    """No thread and no process of ours may outlive its owner, however briefly."""
    yield
    assert multiprocessing.active_children() == []
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("perfect-")]


@pytest.fixture
def anchor() -> Iterator[Listener]:
    with Listener(LOOPBACK, 0, SECRET, send_seconds=60) as opened:
        yield opened


@pytest.fixture
def pair(anchor: Listener) -> Iterator[Pair]:
    """The client's and the server's channel."""
    client = connect([anchor.address], SECRET, 20, send_seconds=60)
    with client, anchor.accept(20) as server:
        yield client, server


@pytest.fixture
def stream() -> Iterator[SharedStream]:
    with SharedStream(lone(), window=4 * BATCHES) as made:
        yield made
