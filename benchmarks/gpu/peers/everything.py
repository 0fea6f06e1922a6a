"""The ceiling: all of it on the device, eager, as anybody writes it."""

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.gpu.peers.task import Running, Setup, batch, eager_step, whole


@contextmanager
def on_the_device(setup: Setup) -> Iterator[Running]:
    yield Running(eager_step(whole(setup, setup.device), batch(setup, setup.device)))
