"""What reads for the devices of a fleet: each has the batches of its own loader, at any pace."""

import os
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from support.loader_datasets import served
from support.shared_streams import lone

from trainers.fleet.inputs import shared_inputs
from trainers.fleet.inputs.input_link import InputAddress, InputLink
from trainers.fleet.inputs.input_service import InputService
from trainers.fleet.inputs.shared_inputs import SharedInputs
from trainers.random_state import TorchSettings

KEY = b"k" * 32


class Devices:
    """Any number of devices, which are all in this process, and the service beside them."""

    def __init__(self) -> None:
        self.address = InputAddress(f"\0test-{os.getpid()}-{os.urandom(4).hex()}", KEY)
        self.service = InputService()
        self._made: list[SharedInputs] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.address.socket)
        self._listener.listen()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            connection = Connection(peer.detach())
            attends = threading.Thread(target=self.service.serve_device, args=(connection, KEY))
            self._threads.append(attends)
            attends.start()

    def new(self) -> SharedInputs:
        inputs = SharedInputs(str(len(self._made)), InputLink(self.address))
        self._made.append(inputs)
        return inputs

    def close(self) -> None:
        for inputs in self._made:
            inputs.close()
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        self.service.close()
        self._listener.close()


@pytest.fixture
def devices() -> Iterator[Devices]:
    made = Devices()
    yield made
    made.close()


@contextmanager
def under(settings: TorchSettings) -> Iterator[None]:
    before = TorchSettings.current()
    settings.apply()
    try:
        yield
    finally:
        before.apply()


def waits(_: tuple[str, ...]) -> bool:
    raise AssertionError("no device waits for another one")


def taken(batch: Any) -> tuple[Any, ...]:
    return tuple(part.numpy().tobytes() for part in batch)


@pytest.mark.parametrize("seed", range(6))
def test_devices_at_any_pace_have_the_batches_and_states_of_loaders_of_their_own(
    seed: int, devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_inputs, "WINDOW", 3)
    dice = random.Random(seed)
    readers: list[Any] = [devices.new().view("job", lone(), None, waits) for _ in range(3)]
    alone = [lone() for _ in readers]
    open_passes: list[Any] = [None] * len(readers)
    expected_passes: list[Any] = [None] * len(readers)
    for _ in range(90):
        one = min(len(readers) - 1, dice.randrange(5))  # the last one is faster
        view, loader = readers[one], alone[one]
        if open_passes[one] is None:
            if dice.random() < 0.3:
                for each in (view, loader):
                    each.set_reuse(2 if loader.reuse == 1 else 1)
            open_passes[one], expected_passes[one] = iter(view), iter(loader)
        batch, expected = next(open_passes[one], None), next(expected_passes[one], None)
        if expected is None:
            assert batch is None
            open_passes[one] = expected_passes[one] = None
            continue
        assert batch is not None
        assert taken(batch) == taken(expected)
        drop = {"stats": None}
        assert {**view.state_dict(), **drop} == {**loader.state_dict(), **drop}
    for loader in alone:
        loader.close()


def test_what_the_service_cannot_take_is_read_by_the_device_which_says_why(
    devices: Devices, caplog: pytest.LogCaptureFixture
) -> None:
    first = devices.new().view("job", lone(), None, waits)
    assert served(first) == served(lone())
    second = devices.new()
    with under(replace(TorchSettings.current(), dtype=torch.float64)):
        view = second.view("job", lone(), None, waits)
        assert served(view) == served(lone())
    assert "read for one device only: its settings of torch are different" in caplog.text
    assert second.label("job") == "1.1"


def test_who_does_not_know_the_key_is_not_let_in(
    devices: Devices, caplog: pytest.LogCaptureFixture
) -> None:
    link = InputLink(InputAddress(devices.address.socket, b"x" * 32))
    view = SharedInputs("0", link).view("job", lone(), None, waits)
    assert served(view) == served(lone())
    assert "cannot be reached: AuthenticationError" in caplog.text
    assert served(devices.new().view("job", lone(), None, waits)) == served(lone())
