"""A stand-in for torch.cuda that writes down what it is asked for."""

from typing import Any

import pytest
import torch

from offload.running.drivers import cuda


class FakeCuda:
    """torch.cuda, with one caller's stream, whose work is done at once."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current: Any = None
        self.device = 1
        fake = self

        class Stream:
            name = "caller"
            lane = ""

            def __init__(self, device: Any = None, priority: int = 0) -> None:
                self.priority = priority

            def __str__(self) -> str:
                return self.lane or self.name

            def wait_event(self, event: Any) -> None:
                event.wait(self)

            def synchronize(self) -> None:
                fake.log.append(f"synchronize {self}")

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.timing, self.at = enable_timing, ""

            def record(self, stream: Any) -> None:
                self.at = str(stream)
                fake.log.append(f"record {stream}")

            def wait(self, stream: Any) -> None:
                fake.log.append(f"{stream} waits for {self.at}")

            def done(self) -> bool:
                return True

            def seconds_since(self, earlier: Any) -> float:
                assert self.timing and earlier.timing
                return 0.001

        self.Stream, self.Event = Stream, Event
        self.caller = self.current = Stream()

    def set_stream(self, stream: Any) -> None:
        self.current, self.device = stream, 0
        self.log.append(f"on {stream}")

    def set_device(self, device: int) -> None:
        self.device = device


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    found = FakeCuda()
    monkeypatch.setattr(cuda, "CudaStream", found.Stream)
    monkeypatch.setattr(cuda, "CudaEvent", found.Event)
    monkeypatch.setattr(cuda, "check_cuda", lambda device: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "set_stream", found.set_stream)
    monkeypatch.setattr(torch.cuda, "set_device", found.set_device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: found.device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: found.current)
    monkeypatch.setattr(cuda, "spin", lambda cycles: found.log.append(f"sleep {cycles}"))
    return found
