"""A device's streams on a CPU: every stream a thread with a queue. For tests, without a device.

    host      enqueue enqueue record wait ...            [ synchronize: waits ]
    compute   [F1][F2] e1 [F3]                           records and waits cost nothing
    h2d       (waits for e1) .......... [W2]

It is as asynchronous as a device: nothing runs when it is enqueued, two streams are ordered by
events alone, and an exception is told at the next `done` or `synchronize`; what was enqueued
behind it is left out. The caller computes on the host itself, so at a step's `end` the host waits.

Delays without a clock: a stream that is held takes its next run only when all others can do no
more and the host does nothing but wait. So it comes as late as the events allow, at every run.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection
from ctypes import memmove
from dataclasses import dataclass, field
from functools import partial

import torch

from offload.drivers import Run
from offload.errors import OffloadError

JOIN_SECONDS = 10.0
LOOK_SECONDS = 0.1
"""A bell that was rung too early is not missed for longer."""
POLLS = 24
"""A host that asked so often, and enqueued nothing meanwhile, waits."""


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
    """Changed under the device's lock."""

    engine: str
    held: bool = False
    queue: deque[Run | Ticket | Wait] = field(default_factory=deque)
    busy: bool = False

    @property
    def over(self) -> bool:
        return not self.queue and not self.busy

    @property
    def stuck(self) -> bool:
        """It has nothing to do, or waits."""
        head = self.queue[0] if self.queue else None
        return not self.busy and (head is None or (isinstance(head, Wait) and not head.ticket.done))


@dataclass(slots=True, eq=False)
class Device:
    """What the threads know. They do not know the driver, so that it can be dropped."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    changed: threading.Condition = field(init=False)
    """For the threads. The host has a bell, as a Ctrl-C must not strike it in a `Condition`."""
    bell: threading.Lock = field(default_factory=threading.Lock)
    streams: dict[str, TwinStream] = field(default_factory=dict)
    error: BaseException | None = None
    lost: str = ""
    waiting: bool = False
    """The host does, inside of `synchronize`."""
    polls: int = 0
    closed: bool = False

    def __post_init__(self) -> None:
        self.changed = threading.Condition(self.lock)

    def tell(self) -> None:
        """Something has changed."""
        self.changed.notify_all()
        if self.waiting and self.bell.locked():
            self.bell.release()

    def check(self, error: bool = False) -> None:
        """Raises where the device is gone, and its error where that is asked for."""
        if self.lost:
            raise RuntimeError(f"CUDA error: {self.lost}")
        if self.closed:
            raise OffloadError("this driver is closed")
        if error and self.error is not None:
            raise self.error

    def put(self, stream: TwinStream, item: Run | Ticket | Wait) -> None:
        with self.lock:
            self.check()
            self.polls = 0
            stream.queue.append(item)
            self.tell()

    def advance(self, stream: TwinStream) -> Run | None:
        """What it runs next, past all marks; None: nothing now."""
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
        """Only held streams could go on."""
        idle = self.waiting or self.polls >= POLLS or self.closed
        return idle and all(s.stuck for s in self.streams.values() if not s.held)

    def stop(self) -> None:
        """The threads end when they have run what is enqueued."""
        with self.lock:
            self.closed = True
            self.tell()


def _serve(device: Device, stream: TwinStream) -> None:
    """The thread of a stream."""
    with torch.no_grad():  # every thread has a mode of its own
        while (run := _next(device, stream)) is not None:
            error = _ran(run)
            with device.lock:
                stream.busy = False
                if device.error is None:
                    device.error = error
                device.tell()
            del run, error


def _next(device: Device, stream: TwinStream) -> Run | None:
    """Waits for it. None: closed, and all is done."""
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
    """Not recorded: done."""

    def __init__(self, device: Device) -> None:
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


def _await(device: Device, over: Callable[[], bool]) -> None:
    """The host waits for something that streams do."""
    try:
        while True:
            with device.lock:
                device.check()
                if over():
                    return
                device.waiting = True
                device.changed.notify_all()  # not by `tell`, which would ring the host's own bell
            device.bell.acquire(timeout=LOOK_SECONDS)
    finally:
        device.waiting = False


class Twin:
    """`hold`: engines whose streams come as late as can be."""

    device = torch.device("cpu")

    def __init__(self, hold: Collection[str] = ()) -> None:
        self._hold = frozenset(hold)
        self._state = Device()
        self._threads: list[threading.Thread] = []
        self._finalizer = weakref.finalize(self, self._state.stop)

    def stream(self, engine: str) -> TwinStream:
        found = self._state.streams.get(engine)
        if found is None:
            found = TwinStream(engine, engine in self._hold)
            with self._state.lock:
                self._state.check()
                self._state.streams[engine] = found
            thread = threading.Thread(
                target=_serve,
                args=(self._state, found),
                name=f"perfect-offload-stream-{engine}",
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
        """The caller is the host: what it did is done."""

    def end(self) -> None:
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
                del error  # it knows this frame

    def drain(self) -> None:
        """A thread of the host does what it starts itself."""

    def lose(self, why: str) -> None:
        """From now on every call fails, as on a device that fell off its bus."""
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
                f"{', '.join(hung)} did not end within {JOIN_SECONDS:.0f} s: a kernel hangs there"
            )
