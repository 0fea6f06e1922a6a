"""The streams of a device on a CPU: each stream is a thread with a queue. For tests.

    host      enqueue enqueue record wait ...            [ synchronize: waits ]
    compute   [F1][F2] e1 [F3]                           records and waits cost nothing
    h2d       (waits for e1) .......... [W2]

It is as asynchronous as a device: nothing runs when it is enqueued, and only events order two
streams. An exception is reported at the next `done` or `synchronize`, and what was enqueued behind
it is left out. The caller computes on the host itself, so at a step's `end` the host waits.

It delays without a clock: a held stream takes its next run only when all others are stuck and the
host only waits. So it comes as late as the events allow, in every run.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from ctypes import memmove
from dataclasses import dataclass, field
from functools import partial

import torch

from offload.errors import OffloadError
from offload.running.drivers.driver import Run

JOIN_SECONDS = 10.0
LOOK_SECONDS = 0.1
"""Seconds after which a waiting host looks again, in case a bell was rung too early."""
POLLS = 24
"""How often a host may ask without enqueuing anything before it has to wait."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One record of an event."""

    done: bool = False
    at: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    ticket: Ticket


@dataclass(slots=True, eq=False)
class TwinStream:
    """The queue of a stream. It is changed under the device's lock."""

    lane: str
    held: bool = False
    queue: deque[Run | Ticket | Wait] = field(default_factory=deque)
    busy: bool = False

    @property
    def over(self) -> bool:
        return not self.queue and not self.busy

    @property
    def stuck(self) -> bool:
        """Whether it has nothing to do or waits."""
        head = self.queue[0] if self.queue else None
        return not self.busy and (head is None or (isinstance(head, Wait) and not head.ticket.done))


@dataclass(slots=True, eq=False)
class TwinDevice:
    """What the threads share. They do not refer to the driver, so that it can be dropped."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    changed: threading.Condition = field(init=False)
    """For the threads. The host has a bell, because a Ctrl-C must not hit it in a `Condition`."""
    bell: threading.Lock = field(default_factory=threading.Lock)
    streams: dict[str, TwinStream] = field(default_factory=dict)
    error: BaseException | None = None
    lost: str = ""
    waiting: bool = False
    """Whether the host waits inside of `synchronize`."""
    polls: int = 0
    closed: bool = False

    def __post_init__(self) -> None:
        self.changed = threading.Condition(self.lock)

    def tell(self) -> None:
        """Wake everybody who waits, after a change."""
        self.changed.notify_all()
        if self.waiting and self.bell.locked():
            self.bell.release()

    def check(self, error: bool = False) -> None:
        """Raise if the device is lost or closed; with `error`, also raise its error."""
        if self.lost:
            raise RuntimeError(f"CUDA error: {self.lost}")
        if self.closed:
            raise OffloadError("this driver is closed; make a new one")
        if error and self.error is not None:
            raise self.error

    def put(self, stream: TwinStream, item: Run | Ticket | Wait) -> None:
        with self.lock:
            self.check()
            self.polls = 0
            stream.queue.append(item)
            self.tell()

    def advance(self, stream: TwinStream) -> Run | None:
        """The stream's next run, past all marks; None if it can run nothing now."""
        while stream.queue:
            head = stream.queue[0]
            if isinstance(head, Wait):
                if not head.ticket.done:
                    return None
            elif isinstance(head, Ticket):
                head.done, head.at = True, time.perf_counter()
            elif stream.held and not self.at_rest():
                return None
            stream.queue.popleft()
            if isinstance(head, Ticket | Wait) or self.error is not None:
                self.tell()
                continue
            stream.busy = True
            self.polls = 0
            return head
        return None

    def at_rest(self) -> bool:
        """Whether only held streams could go on."""
        idle = self.waiting or self.polls >= POLLS or self.closed
        return idle and all(s.stuck for s in self.streams.values() if not s.held)

    def stop(self) -> None:
        """Tell the threads to end when they have run what is enqueued."""
        with self.lock:
            self.closed = True
            self.tell()


def _serve(device: TwinDevice, stream: TwinStream) -> None:
    """The thread of a stream."""
    with torch.no_grad():  # grad mode belongs to a thread
        while (run := _next(device, stream)) is not None:
            error = _ran(run)
            with device.lock:
                stream.busy = False
                if device.error is None:
                    device.error = error
                device.tell()
            del run, error


def _next(device: TwinDevice, stream: TwinStream) -> Run | None:
    """Wait for the next run. None: the device is closed and everything has run."""
    with device.lock:
        while (run := device.advance(stream)) is None:
            if device.closed and not stream.queue:
                return None
            device.changed.wait()
        return run


def _ran(run: Run) -> BaseException | None:
    try:
        run()
    except BaseException as error:
        return error
    return None


class TwinEvent:
    """An event. One that was never recorded is done."""

    def __init__(self, device: TwinDevice) -> None:
        self._device = device
        self.ticket = Ticket(done=True)

    def record(self, stream: TwinStream) -> None:
        self.ticket = Ticket()
        self._device.put(stream, self.ticket)

    def done(self) -> bool:
        device = self._device
        with device.lock:
            device.check(error=True)
            if not self.ticket.done:
                device.polls += 1
                if device.polls == POLLS:
                    device.tell()
            return self.ticket.done

    def synchronize(self) -> None:
        ticket = self.ticket
        _await(self._device, lambda: ticket.done)
        with self._device.lock:
            self._device.check(error=True)

    def seconds_since(self, earlier: "TwinEvent") -> float:
        return self.ticket.at - earlier.ticket.at


def _await(device: TwinDevice, over: Callable[[], bool]) -> None:
    """Make the host wait for something that streams do."""
    try:
        while True:
            with device.lock:
                device.check()
                if over():
                    return
                device.waiting = True
                device.changed.notify_all()  # `tell` would ring the host's own bell, too
            device.bell.acquire(timeout=LOOK_SECONDS)
    finally:
        device.waiting = False


class Twin:
    """A driver of this CPU. `hold`: lanes whose streams run as late as possible."""

    device = torch.device("cpu")

    def __init__(self, hold: Collection[str] = ()) -> None:
        self._hold = frozenset(hold)
        self._state = TwinDevice()
        self._threads: list[threading.Thread] = []
        self._finalizer = weakref.finalize(self, self._state.stop)

    def stream(self, lane: str) -> TwinStream:
        found = self._state.streams.get(lane)
        if found is None:
            found = TwinStream(lane, lane in self._hold)
            with self._state.lock:
                self._state.check()
                self._state.streams[lane] = found
            thread = threading.Thread(
                target=_serve,
                args=(self._state, found),
                name=f"perfect-offload-stream-{lane}",
                daemon=True,
            )
            self._threads.append(thread)
            thread.start()
        return found

    def event(self, timing: bool = False) -> TwinEvent:
        return TwinEvent(self._state)

    def wait(self, stream: TwinStream, event: TwinEvent) -> None:
        self._state.put(stream, Wait(event.ticket))

    def enqueue(self, stream: TwinStream, run: Run) -> None:
        self._state.put(stream, run)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Run:
        return partial(memmove, target.data_ptr(), source.data_ptr(), target.nbytes)

    def begin(self) -> None:
        """There is nothing to wait for: the caller's work on the host is done."""

    def end(self) -> None:
        self.synchronize()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """There is nothing to put aside: a twin has no current stream."""
        yield
        self.synchronize()

    def synchronize(self) -> None:
        state = self._state
        streams = state.streams.values()
        _await(state, lambda: all(stream.over for stream in streams))
        error, state.error = state.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # it refers to this frame

    def drain(self) -> None:
        """There is nothing to wait for: a thread of the host works synchronously."""

    def lose(self, why: str) -> None:
        """Make every later call fail, as on a device that fell off its bus."""
        with self._state.lock:
            self._state.lost = why
            self._state.tell()

    def close(self) -> None:
        self._finalizer()
        for thread in self._threads:
            thread.join(JOIN_SECONDS)
        hung = [thread.name for thread in self._threads if thread.is_alive()]
        if hung:
            raise OffloadError(
                f"{', '.join(hung)} did not end within {JOIN_SECONDS:.0f} s, so a kernel hangs"
                " there. End this process"
            )
