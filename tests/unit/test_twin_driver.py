"""A device's streams on a CPU: queues, events, held streams, errors, the end."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from benchmarks.twins.twin_streams import POLLS, Twin
from offload.errors import OffloadError

WAIT = 20.0


@pytest.fixture
def make() -> Iterator[Callable[..., Twin]]:
    made: list[Twin] = []

    def one(*args: Any, **kwargs: Any) -> Twin:
        made.append(Twin(*args, **kwargs))
        return made[-1]

    yield one
    for twin in made:
        twin.close()


class Gate:
    """A run that waits until it is let go."""

    def __init__(self, log: list[str] | None = None, name: str = "") -> None:
        self.began, self.go = threading.Event(), threading.Event()
        self.log, self.name = log, name

    def __call__(self) -> None:
        self.began.set()
        assert self.go.wait(WAIT)
        if self.log is not None:
            self.log.append(self.name)


def test_what_is_enqueued_runs_later_and_in_its_order(make: Any) -> None:
    twin, log, gate = make(), [], Gate()
    compute = twin.stream("compute")
    twin.enqueue(compute, gate)
    for n in range(5):
        twin.enqueue(compute, lambda n=n: log.append(n))
    assert gate.began.wait(WAIT) and log == []
    gate.go.set()
    twin.synchronize()
    assert log == [0, 1, 2, 3, 4]


def test_a_stream_is_the_same_at_every_call_and_runs_on_a_thread_of_its_own(make: Any) -> None:
    twin, names = make(), {}
    for lane in ("compute", "h2d"):
        assert twin.stream(lane) is twin.stream(lane)
        run = lambda e=lane: names.setdefault(e, threading.current_thread().name)  # noqa: E731
        twin.enqueue(twin.stream(lane), run)
    twin.synchronize()
    assert names == {e: f"perfect-offload-stream-{e}" for e in ("compute", "h2d")}


def test_a_stream_waits_for_an_event_and_another_does_not(make: Any) -> None:
    twin, log = make(), []
    compute, h2d, d2h = map(twin.stream, ("compute", "h2d", "d2h"))
    gate, event, free = Gate(log, "compute"), twin.event(), twin.event()
    twin.enqueue(compute, gate)
    event.record(compute)
    twin.wait(h2d, event)
    twin.enqueue(h2d, lambda: log.append("h2d"))
    twin.enqueue(d2h, lambda: log.append("d2h"))
    free.record(d2h)
    free.synchronize()
    assert log == ["d2h"] and not event.done() and free.done()
    gate.go.set()
    twin.synchronize()
    assert log == ["d2h", "compute", "h2d"] and event.done()


def test_an_event_that_was_never_recorded_is_done(make: Any) -> None:
    twin, log = make(), []
    event = twin.event()
    assert event.done()
    event.synchronize()
    twin.wait(twin.stream("h2d"), event)
    twin.enqueue(twin.stream("h2d"), lambda: log.append(1))
    twin.synchronize()
    assert log == [1]


def test_a_wait_is_for_the_record_that_there_was_when_it_was_called(make: Any) -> None:
    twin, log, gate = make(), [], Gate()
    compute, h2d = twin.stream("compute"), twin.stream("h2d")
    event, seen = twin.event(), twin.event()
    event.record(compute)
    twin.wait(h2d, event)
    twin.enqueue(compute, gate)
    event.record(compute)  # behind the gate: nobody who waited before is held up by it
    twin.enqueue(h2d, lambda: log.append("h2d"))
    seen.record(h2d)
    seen.synchronize()
    assert log == ["h2d"] and not event.done()
    gate.go.set()
    event.synchronize()


@pytest.mark.parametrize("by", ["synchronize", "polls"])
def test_a_held_stream_comes_when_all_others_can_do_no_more(by: str, make: Any) -> None:
    for _ in range(20):
        twin, log = make(hold=("h2d",)), []
        compute, h2d = twin.stream("compute"), twin.stream("h2d")
        event = twin.event()
        twin.enqueue(h2d, lambda log=log: log.append("w1"))
        event.record(h2d)
        for n in range(3):
            twin.enqueue(compute, lambda n=n, log=log: log.append(f"f{n}"))
        twin.wait(compute, event)
        twin.enqueue(compute, lambda log=log: log.append("f3"))
        twin.enqueue(h2d, lambda log=log: log.append("w2"))
        if by == "polls":
            while not event.done():
                threading.Event().wait(1e-5)
        twin.synchronize()
        assert log == ["f0", "f1", "f2", "w1", "f3", "w2"]


def test_a_host_that_waits_is_woken_by_what_happens_alone(make: Any) -> None:
    twin, gate, heard = make(), Gate(), []

    class Bell:
        lock = twin._state.bell

        def __getattr__(self, name: str) -> Any:
            return getattr(self.lock, name)

        def acquire(self, timeout: float) -> bool:
            heard.append(self.lock.acquire(timeout=timeout))
            if not heard[-1] or len(heard) > 100:
                gate.go.set()
            return heard[-1]

    twin.enqueue(twin.stream("compute"), gate)
    assert gate.began.wait(WAIT)
    twin._state.bell = Bell()
    twin.synchronize()
    assert heard.count(True) <= 2  # that the run is over, and what was rung before


def test_a_held_stream_does_nothing_while_the_host_is_at_work(make: Any) -> None:
    twin, log = make(hold=("h2d",)), []
    h2d, event = twin.stream("h2d"), twin.event()
    twin.enqueue(h2d, lambda: log.append(1))
    event.record(h2d)
    for _ in range(POLLS - 1):
        assert not event.done()
    twin.enqueue(twin.stream("compute"), lambda: None)  # the host goes on
    for _ in range(POLLS - 1):
        assert not event.done()
    assert log == []


@pytest.mark.parametrize("at", ["synchronize", "end", "done", "event"])
def test_an_exception_is_told_late_as_it_was_and_what_is_behind_it_is_left_out(
    at: str, make: Any
) -> None:
    twin, log, error = make(), [], ValueError("no good")
    compute, event = twin.stream("compute"), twin.event()

    def fail() -> None:
        raise error

    twin.enqueue(compute, fail)
    twin.enqueue(compute, lambda: log.append(1))
    event.record(compute)
    call = {"done": event.done, "event": event.synchronize, "end": twin.end}.get(at)
    with pytest.raises(ValueError, match="no good") as raised:
        while True:
            (call or twin.synchronize)()
    assert raised.value is error
    if at in ("done", "event"):
        with pytest.raises(ValueError, match="no good"):
            twin.synchronize()
    twin.enqueue(compute, lambda: log.append(2))
    twin.synchronize()
    assert log == [2]


def test_a_lost_device_fails_every_call_and_can_be_closed(make: Any) -> None:
    twin = make(hold=("h2d",))
    h2d, event = twin.stream("h2d"), twin.event()
    twin.enqueue(h2d, lambda: None)
    event.record(h2d)
    twin.lose("unspecified launch failure")
    for call in (
        event.done,
        event.synchronize,
        twin.synchronize,
        lambda: twin.enqueue(h2d, lambda: None),
        lambda: event.record(h2d),
        lambda: twin.wait(h2d, event),
    ):
        with pytest.raises(RuntimeError, match="CUDA error: unspecified launch failure"):
            call()
    twin.close()


def test_a_copy_moves_bytes_when_it_is_its_turn(make: Any) -> None:
    twin, gate = make(), Gate()
    source = torch.arange(64, dtype=torch.uint8)
    target = torch.zeros(64, dtype=torch.uint8)
    twin.enqueue(twin.stream("h2d"), gate)
    twin.enqueue(twin.stream("h2d"), twin.copy(target[:32], source[32:]))
    assert not target.any()
    gate.go.set()
    twin.synchronize()
    assert torch.equal(target[:32], source[32:]) and not target[32:].any()


def test_timed_events_say_how_long_the_stream_took(make: Any) -> None:
    twin = make()
    first, last = twin.event(timing=True), twin.event(timing=True)
    first.record(twin.stream("compute"))
    twin.enqueue(twin.stream("compute"), lambda: sum(range(100_000)))
    last.record(twin.stream("compute"))
    twin.synchronize()
    assert 0 < last.seconds_since(first) < WAIT


def test_kernels_of_a_stream_run_without_autograd(make: Any) -> None:
    twin, seen = make(), []
    twin.enqueue(twin.stream("compute"), lambda: seen.append(torch.is_grad_enabled()))
    twin.synchronize()
    assert seen == [False]


def test_close_runs_what_is_enqueued_joins_the_threads_and_may_be_called_again() -> None:
    twin, log = Twin(hold=("h2d",)), []
    for n in range(3):
        twin.enqueue(twin.stream("h2d"), lambda n=n: log.append(n))
    twin.close()
    twin.close()
    assert log == [0, 1, 2]
    assert not [t for t in threading.enumerate() if t.name.startswith("perfect-offload-stream")]
    with pytest.raises(OffloadError, match="closed"):
        twin.enqueue(twin.stream("h2d"), lambda: None)


def test_one_that_is_dropped_ends_its_threads() -> None:
    twin = Twin()
    twin.enqueue(twin.stream("compute"), lambda: None)
    [thread] = twin._threads
    del twin
    thread.join(WAIT)
    assert not thread.is_alive()
