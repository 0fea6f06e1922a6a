"""The threads of an engine and of a tail: what waits for what, what an error ends."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from offload.running.drivers.cuda import Cuda
from offload.running.engines.crew import CrewStep
from offload.running.engines.serial import Serial
from offload.running.engines.streams import Streams
from offload.running.engines.tail_crew import TailCrew
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


# ---- a thread that wakes late -------------------------------------------------------------------


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


def test_a_failure_is_seen_whole(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def noted_slowly(step: CrewStep, error: BaseException, node: int | None) -> None:
        step.stopping, step.error = True, error
        time.sleep(0.2)
        step.failed = node

    def fails() -> None:
        raise ValueError("broken")

    monkeypatch.setattr(CrewStep, "fail", noted_slowly)
    record = Record()
    with pytest.raises(ValueError, match="broken"):
        engine.run(on_host(fails, nothing), record)
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


class Case:
    """c0 -> h1 -> h2, c0 -> h3, c4: where h3 lets h1 go on, and c4 comes last on the device."""

    def __init__(self, fails: int = -1) -> None:
        self.log: list[str] = []
        self.fails = fails
        self.third = threading.Event()
        lanes = ["compute", "host", "host", "host", "compute"]
        runs = [partial(self.run, node) for node in range(5)]
        self.work = work(lanes, runs, [[], [0], [1], [0], [0]])

    def run(self, node: int) -> None:
        self.log.append(f"begin {node}")
        if node == 1:
            assert self.third.wait(WAIT)
        if node == 3:
            self.third.set()
        if node == self.fails:
            raise OSError("broken")
        self.log.append(f"end {node}")


def test_nodes_of_a_tail_wait_for_the_body_and_for_each_other() -> None:
    case, crew, record = Case(), TailCrew(host_workers=2), Record()
    split = crew.split(case.work, (1, 2, 3))
    for _ in range(2):
        case.log.clear()
        case.third.clear()
        record = Record()
        crew.begin(split)
        Serial().run(split.body, record)
        crew.finish(split, record)
        crew.end(split, record)
        crew.end(split, record)
        assert case.log.index("end 1") < case.log.index("begin 2")
        assert case.log.index("end 0") < min(map(case.log.index, ("begin 1", "begin 3")))
        assert sorted(record.finished) == [0, 1, 2, 3, 4]
        by_lane = {ran.name: ran.nodes for ran in record.lanes}
        assert by_lane[""] == [0, 4] and sorted(by_lane["host-0"] + by_lane["host-1"]) == [1, 2, 3]
        assert all(len(ran.nodes) == len(ran.ends) for ran in record.lanes)
    crew.close()


def test_an_error_of_a_tail_ends_it_and_names_the_node_of_the_step() -> None:
    case, crew, record = Case(fails=1), TailCrew(host_workers=2), Record()
    split = crew.split(case.work, (1, 2, 3))
    crew.begin(split)
    Serial().run(split.body, record)
    with pytest.raises(OSError, match="broken"):
        crew.finish(split, record)
    crew.end(split, record)
    assert record.failed == 1 and "begin 2" not in case.log
    assert sorted(record.finished) == [0, 3, 4]
    case.fails = -1
    crew.begin(split)
    Serial().run(split.body, record := Record())
    crew.finish(split, record)
    crew.end(split, record)
    assert sorted(record.finished) == [0, 1, 2, 3, 4]
    crew.close()


def test_a_body_that_fails_begins_no_more_of_its_tail() -> None:
    case, crew, record = Case(fails=0), TailCrew(host_workers=1), Record()
    split = crew.split(case.work, (1, 2, 3))
    crew.begin(split)
    with pytest.raises(OSError, match="broken"):
        Serial().run(split.body, record)
    crew.end(split, record)
    crew.wait()
    assert case.log == ["begin 0"] and record.failed == 0 and record.finished == []
    crew.close()
