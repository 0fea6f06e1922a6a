"""The threads of an engine: one that wakes late; one that cannot be started."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from offload.running.drivers.cuda import Cuda
from offload.running.engines.crew import Crew, CrewStep, Worker
from offload.running.engines.streams import Streams
from offload.running.engines.threads import Threads
from offload.running.engines.work import Record, StepWork

WAIT = 20.0
ENGINES: dict[str, Callable[[], Any]] = {
    "threads": lambda: Threads(host_workers=2),
    "streams": lambda: Streams(Cuda(torch.device("cuda")), host_workers=2),
}


@pytest.fixture(params=["threads", pytest.param("streams", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = ENGINES[request.param]()
    yield made
    made.close()


def work(lane_of: Sequence[str], runs: Sequence[Any], deps: Sequence[Sequence[int]]) -> StepWork:
    """Nodes that wait for others."""
    after: list[list[int]] = [[] for _ in runs]
    for node, needed in enumerate(deps):
        for dep in needed:
            after[dep].append(node)
    return StepWork(
        runs=runs,
        lane_of=lane_of,
        waits=[len(needed) for needed in deps],
        successors=after,
        first=[node for node, needed in enumerate(deps) if not needed],
        lanes=list(dict.fromkeys(lane_of)),
    )


def nothing() -> None: ...


def on_host(first: Callable[[], Any], second: Callable[[], Any]) -> StepWork:
    """Two nodes on the host, which become ready at once."""
    return work(["compute", "host", "host"], [nothing, first, second], [[], [0], [0]])


def together() -> StepWork:
    """A step that takes both workers of the host."""
    both = threading.Barrier(2)
    return on_host(lambda: both.wait(WAIT), lambda: both.wait(WAIT))


def hired(engine: Any) -> list[Worker]:
    return engine._crew.hired["host"]


# ---- a thread that wakes late -------------------------------------------------------------------


class LateBell:
    """It rings at once, and is heard when that is said."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.asked, self.rung, self.hear = (threading.Event() for _ in range(3))

    def locked(self) -> bool:
        return self._lock.locked()

    def release(self) -> None:
        self._lock.release()
        self.rung.set()

    def acquire(self) -> None:
        self.asked.set()
        assert self._lock.acquire(timeout=WAIT)
        assert self.hear.wait(WAIT)
        self.asked.clear()


def hung_on(worker: Worker) -> LateBell:
    """The bell that its parked thread waits for now."""
    late, old = LateBell(), worker.bell
    worker.bell = late  # type: ignore[assignment]
    old.release()
    assert late.asked.wait(WAIT)
    return late


def test_a_thread_that_wakes_in_a_step_without_its_lane_goes_back_to_sleep(engine: Any) -> None:
    engine.run(together(), Record())
    late = hung_on(hired(engine)[1])
    # The other one takes both nodes; this one is rung, and sleeps through the step.
    engine.run(on_host(lambda: late.rung.wait(WAIT), nothing), Record())

    def woken() -> None:
        late.asked.clear()
        late.hear.set()
        assert late.asked.wait(WAIT), "the thread does not come back to its bell"

    engine.run(work(["compute", "h2d"], [woken, nothing], [[], []]), Record())
    engine.run(together(), Record())


def test_an_error_around_a_node_ends_the_step_and_not_the_thread(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.run(together(), Record())
    take, error = Crew.take, MemoryError("no room for a number")

    def taken(crew: Crew, worker: Worker, step: Any) -> int | None:
        if worker.lane == "host":
            raise error
        return take(crew, worker, step)

    monkeypatch.setattr(Crew, "take", taken)
    record = Record()
    with pytest.raises(MemoryError, match="no room") as raised:
        engine.run(on_host(nothing, nothing), record)
    assert raised.value is error and record.failed is None
    monkeypatch.undo()
    engine.run(together(), Record())


def test_of_two_failures_in_threads_the_first_one_is_told(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, noted, note = threading.Barrier(2), threading.Event(), CrewStep.fail

    def noting(step: CrewStep, error: BaseException, node: int | None) -> None:
        note(step, error, node)
        noted.set()

    def first() -> None:
        both.wait(WAIT)
        raise ValueError("first")

    def second() -> None:
        both.wait(WAIT)
        assert noted.wait(WAIT)
        raise ValueError("second")

    monkeypatch.setattr(CrewStep, "fail", noting)
    record = Record()
    with pytest.raises(ValueError, match="first"):
        engine.run(on_host(first, second), record)
    assert record.failed == 1


# ---- a thread that is not started ---------------------------------------------------------------


@pytest.mark.parametrize("refused", [1, 2])
def test_where_a_thread_is_refused_the_next_step_starts_those_that_lack(
    refused: int, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, left = threading.Thread.start, [refused]

    def started(thread: threading.Thread) -> None:
        if thread.name.startswith("perfect-offload-host"):
            left[0] -= 1
            if not left[0]:
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", started)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        engine.run(together(), Record())
    engine.run(together(), Record())
    names = [t.name for t in threading.enumerate() if t.name.startswith("perfect-offload-host")]
    assert sorted(names) == ["perfect-offload-host-0", "perfect-offload-host-1"]
    engine.close()
    assert not [t for t in threading.enumerate() if t.name in names]


def test_an_engine_whose_thread_was_refused_can_be_closed(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def started(thread: threading.Thread) -> None:
        if thread.name == "perfect-offload-host-1":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", started)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        engine.run(together(), Record())
    engine.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("perfect-offload")]


@pytest.mark.parametrize("runs", [True, False])
def test_a_thread_whose_start_a_ctrl_c_strikes_ends_by_itself(
    runs: bool, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it runs already or never will; the next step has another one."""
    start, struck = threading.Thread.start, []

    def started(thread: threading.Thread) -> None:
        strikes = thread.name == "perfect-offload-host-1" and not struck
        if strikes:
            struck.append(thread)
        if runs or not strikes:
            start(thread)
        if strikes:
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", started)
    with pytest.raises(KeyboardInterrupt):
        engine.run(together(), Record())
    engine.run(together(), Record())
    engine.close()
    assert not struck[0].is_alive()
    assert not [t for t in threading.enumerate() if t.name.startswith("perfect-offload")]
