"""The streams and events of one device. Whoever drives a device knows this, and nothing of nodes.

    host     enqueue(compute, F1)  record(e)  wait(h2d, e)  enqueue(h2d, W2)     returns at once
    compute  [ F1 ....... ] e
    h2d                      `-> [ W2 .. ]

    cuda.py   torch.cuda streams and events
    twin.py   the same on a CPU, a thread a stream: for tests, and for machines without a device

A stream runs what is enqueued on it one after the other; two streams are ordered by events alone.
`begin` and `end` fence a step against what the caller's own stream does before and after it. What
goes wrong on the device is told late: by `done`, by `synchronize`, or by any later call.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch

Run = Callable[[], object]


class Stream(Protocol):
    """A queue of one device."""

    @property
    def engine(self) -> str:
        """Whose it is: compute, h2d, d2h."""
        ...


class Event(Protocol):
    """A mark on a stream. One that was never recorded is done; recording it again moves it."""

    def record(self, stream: Any) -> None:
        """After what the stream has in its queue now."""
        ...

    def done(self) -> bool: ...

    def synchronize(self) -> None:
        """The host waits."""
        ...

    def seconds_since(self, earlier: Any) -> float:
        """Of the device's clock; both were made with `timing` and are done."""
        ...


class Driver(Protocol):
    """Called by one thread at a time. `close` waits for what runs, with a bound; safe again."""

    @property
    def device(self) -> torch.device: ...

    def stream(self, engine: str) -> Any:
        """Its stream, the same at every call."""
        ...

    def event(self, timing: bool = False) -> Any: ...

    def wait(self, stream: Any, event: Any) -> None:
        """What is enqueued on the stream from now on begins when the event, as it was last
        recorded by now, is done."""
        ...

    def enqueue(self, stream: Any, run: Run) -> None:
        """`run()` with this stream as the current one: kernels and copies that it starts go there.
        Its exception may come from here, or late, as one of the device."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Run:
        """A call that starts a copy of bytes on the current stream; one side is the host's."""
        ...

    def begin(self) -> None:
        """All streams wait for what the caller's current stream has in its queue."""
        ...

    def end(self) -> None:
        """The caller's current stream, the same as at `begin`, waits for all of them. Safe to call
        without a `begin`, and again."""
        ...

    def synchronize(self) -> None:
        """The host waits for all streams. Raises what went wrong on them, once."""
        ...

    def drain(self) -> None:
        """Any thread of the host waits for what it started on its own current stream."""
        ...

    def close(self) -> None: ...
