"""The streams and events of one device. A driver knows the device and nothing about nodes.

    host     enqueue(compute, F1)  record(e)  wait(h2d, e)  enqueue(h2d, W2)     returns at once
    compute  [ F1 ....... ] e
    h2d                      `-> [ W2 .. ]

    cuda.py             torch.cuda's streams and events
    benchmarks/jobs/   the same on a CPU, with a thread a stream: for tests and smoke runs

A stream runs what is enqueued on it one after the other; only events order two streams. `begin` and
`end` fence a step against what the caller's own stream does before and after it. Errors of the
device are reported late: by `done`, by `synchronize`, or by any later call.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

Run = Callable[[], object]


class Stream(Protocol):
    """A queue of one device."""

    @property
    def lane(self) -> str:
        """The lane of the stream: compute, h2d or d2h."""
        ...


class Event(Protocol):
    """A mark on a stream. An event that was never recorded is done. Recording it again moves it."""

    def record(self, stream: Any) -> None:
        """Mark the present end of the stream's queue."""
        ...

    def done(self) -> bool: ...

    def synchronize(self) -> None:
        """Make the host wait for the event."""
        ...

    def seconds_since(self, earlier: Any) -> float:
        """Seconds of the device's clock. Both events were made with `timing` and are done."""
        ...


class Driver(Protocol):
    """Use it from one thread at a time. `close` waits for what runs, for a limited time, and may be
    called again."""

    @property
    def device(self) -> torch.device: ...

    def stream(self, lane: str) -> Any:
        """The stream of a lane, the same one at every call."""
        ...

    def event(self, timing: bool = False) -> Any: ...

    def wait(self, stream: Any, event: Any) -> None:
        """What is enqueued on the stream from now on waits for the last record of the event."""
        ...

    def enqueue(self, stream: Any, run: Run) -> None:
        """Call `run()` with this stream as the current one: kernels and copies that it starts go
        there. Its exception may be raised here, or late, as one of the device."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Run:
        """A function that starts a copy of bytes on the current stream; one side is on the host."""
        ...

    def begin(self) -> None:
        """Make all streams wait for what the caller's current stream has in its queue."""
        ...

    def end(self) -> None:
        """Make the caller's current stream, the same as at `begin`, wait for all streams. It may be
        called without a `begin`, and again."""
        ...

    def paused(self) -> AbstractContextManager[None]:
        """Let another thread begin and end steps in this block, in the middle of one between
        `begin` and `end`. Nothing runs on the streams when the block begins."""
        ...

    def synchronize(self) -> None:
        """Make the host wait for all streams. Raises each error of theirs once."""
        ...

    def drain(self) -> None:
        """Wait, on any thread of the host, for what it started on its own current stream."""
        ...

    def close(self) -> None: ...
