"""What the CUDA drivers ask of torch.cuda, seen by a stand-in that writes it down.

It proves that the calls are those that are meant, in their order; not what a device does with them.
"""

import gc
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.errors import OffloadError
from offload.planning.refusal import smallest_budget
from offload.running.drivers import cuda
from offload.running.drivers.cuda import Cuda, CudaEvent, CudaStream
from offload.running.drivers.cuda_graph import MODE, GraphCuda
from offload.running.runner import Runner

HERE = Path(__file__).parents[1] / "integration"


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


def test_a_step_is_fenced_both_ways_and_leaves_the_callers_stream_and_device(
    fake: FakeCuda,
) -> None:
    driver = Cuda(torch.device("cuda"), {"h2d": 500})
    compute, h2d = driver.stream("compute"), driver.stream("h2d")
    assert driver.stream("h2d") is h2d
    assert (compute.priority, h2d.priority) == (0, -1)
    driver.begin()
    driver.enqueue(compute, lambda: fake.log.append("F1"))
    driver.enqueue(compute, lambda: fake.log.append("F2"))
    event = driver.event()
    event.record(compute)
    driver.wait(h2d, event)
    driver.enqueue(h2d, lambda: fake.log.append("W2"))
    driver.stream("d2h")  # asked for in mid-step: it comes after the caller's work as well
    assert fake.log == [
        "record caller", "compute waits for caller", "h2d waits for caller",
        "on compute", "F1", "F2", "record compute", "h2d waits for compute",
        "on h2d", "sleep 500", "W2", "d2h waits for caller",
    ]  # fmt: skip
    fake.log.clear()
    driver.end()
    assert fake.log == [
        "on caller",
        "record compute", "caller waits for compute",
        "record h2d", "caller waits for h2d",
        "record d2h", "caller waits for d2h",
    ]  # fmt: skip
    assert fake.current is fake.caller and fake.device == 1
    fake.log.clear()
    driver.end()
    assert fake.log == []
    driver.begin()
    driver.enqueue(compute, lambda: fake.log.append("F1"))
    assert fake.log[-2:] == ["on compute", "F1"]
    driver.close()
    driver.close()
    assert fake.current is fake.caller


def test_an_end_that_was_struck_half_way_may_be_called_again(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Cuda(torch.device("cuda"))
    compute = driver.stream("compute")
    driver.begin()
    driver.enqueue(compute, lambda: None)
    with monkeypatch.context() as patch:
        patch.setattr(fake.Event, "record", lambda self, stream: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            driver.end()
    assert fake.current is fake.caller
    fake.log.clear()
    driver.end()
    assert fake.log == ["on caller", "record compute", "caller waits for compute"]


def test_a_whole_step_goes_through_it(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    graphs = importlib.import_module("stream_graphs")
    graph = graphs.bound(graphs.chain(host_updates=True))
    tensors = graph.program.tensors
    plainly = graphs.Plainly(graph, {k: v.clone() for k, v in tensors.items()})
    made = offload.plan(graph, smallest_budget(graph, 0)[0], placement="copy", recompute=False)
    with Runner(made, "cuda", driver=Cuda(torch.device("cuda"))) as runner:
        for step in range(3):
            if step == 2:
                runner.measure()
            x = graphs.batch(seed=step)
            assert torch.equal(runner(x)[0], plainly.step(x)[0])
            assert fake.current is fake.caller
        assert runner.trace.timed
    assert all(torch.equal(tensors[k], plainly.held[k]) for k in tensors)


def test_a_graph_of_several_devices_is_refused(fake: FakeCuda) -> None:
    with pytest.raises(OffloadError, match="lane compute1 has no stream on cuda:0"):
        Cuda(torch.device("cuda")).stream("compute1")


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OffloadError, match="driver is missing or too old"):
        Cuda(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(OffloadError, match="no cuda:2: this process sees 2 devices"):
        Cuda(torch.device("cuda", 2))


# ---- capture and replay --------------------------------------------------------------------------


class FakeGraphs:
    """torch.cuda's graphs and the device's generator, on the stand-in."""

    def __init__(self, fake: FakeCuda) -> None:
        self.refused = ""
        """"begin" or "end": what CUDA does not do from now on."""
        self.state = "of the capture"
        """Of the generator."""
        self.pools = 0
        graphs = self

        class Graph:
            def __init__(self) -> None:
                self.runs: list[Callable[[], object]] = []
                self.begun_on: Any = None

            def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
                assert capture_error_mode == MODE and not gc.isenabled()
                fake.log.append(f"begin in pool {pool}")
                graphs.refuse("begin")
                self.begun_on = fake.current

            def capture_end(self) -> None:
                fake.log.append("end")
                if self.begun_on is None:
                    raise RuntimeError("CUDA error: no capture")
                assert fake.current is self.begun_on
                graphs.refuse("end")

            def replay(self) -> None:
                fake.log.append("replay")
                for run in self.runs:
                    run()

            def reset(self) -> None:
                fake.log.append("reset")

        self.Graph = Graph

    def refuse(self, what: str) -> None:
        if self.refused == what:
            raise RuntimeError(f"CUDA error: {what} is not permitted")

    def handle(self) -> int:
        self.pools += 1
        return self.pools

    def clone_state(self) -> str:
        return f"a copy {self.state}"

    def graphsafe_set_state(self, state: str) -> None:
        self.state = state


@pytest.fixture
def graphs(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeGraphs:
    found = FakeGraphs(fake)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", found.Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", found.handle)
    monkeypatch.setattr(torch.cuda, "default_generators", (found,))
    return found


class Recorded(GraphCuda):
    """In a capture nothing runs."""

    def enqueue(self, stream: Any, run: Callable[[], object]) -> None:
        if self._graph is None:
            super().enqueue(stream, run)
        else:
            super().enqueue(stream, lambda: self._graph.runs.append(run))  # type: ignore[union-attr]


def captured(driver: GraphCuda) -> Callable[[], object]:
    """On the compute stream, while another one is current when it ends."""
    driver.begin_capture(driver.stream("compute"))
    driver.enqueue(driver.stream("h2d"), lambda: None)
    return driver.end_capture()


def test_graphs_share_a_pool_for_as_long_as_one_of_them_is_there(
    fake: FakeCuda, graphs: FakeGraphs
) -> None:
    driver = Recorded(torch.device("cuda"))
    first, second = captured(driver), captured(driver)
    assert fake.log == [
        "synchronize compute", "on compute", "begin in pool 1", "on h2d", "on compute", "end",
        "synchronize compute", "synchronize h2d", "on compute", "begin in pool 1", "on h2d",
        "on compute", "end",
    ]  # fmt: skip
    del first
    third = captured(driver)
    assert graphs.pools == 1
    del second, third
    gc.collect()
    captured(driver)
    assert graphs.pools == 2
    assert gc.isenabled() and graphs.state == "of the capture"


def test_a_capture_that_cannot_end_is_buried_and_the_generator_goes_on_with_a_copy(
    fake: FakeCuda, graphs: FakeGraphs
) -> None:
    driver = Recorded(torch.device("cuda"))
    graphs.refused = "end"
    with pytest.raises(RuntimeError, match="end is not permitted"):
        captured(driver)
    assert [type(graph) for graph in driver._broken] == [graphs.Graph]
    assert graphs.state == "a copy of the capture" and gc.isenabled()
    with pytest.raises(RuntimeError, match="no capture is going on"):
        driver.end_capture()
    graphs.refused = ""
    captured(driver)
    assert graphs.pools == 2  # what is buried keeps its pool


def test_a_capture_that_is_dropped_is_ended_where_it_began(
    fake: FakeCuda, graphs: FakeGraphs
) -> None:
    driver = Recorded(torch.device("cuda"))
    driver.drop_capture()
    assert fake.log == []
    driver.begin_capture(driver.stream("compute"))
    driver.enqueue(driver.stream("h2d"), lambda: None)
    driver.drop_capture()
    assert fake.log[-3:] == ["on compute", "end", "reset"]
    assert driver._broken == () and gc.isenabled()
    graphs.refused = "end"
    driver.begin_capture(driver.stream("compute"))
    driver.drop_capture()  # it does not say once more what is broken
    assert len(driver._broken) == 1 and fake.log[-1] == "end"
    graphs.refused = "begin"
    with pytest.raises(RuntimeError, match="begin is not permitted"):
        driver.begin_capture(driver.stream("compute"))
    driver.drop_capture()
    assert len(driver._broken) == 2 and gc.isenabled()


@pytest.mark.parametrize("at", ["disable", "enable", "set_stream"])
def test_a_ctrl_c_at_either_end_of_a_capture_leaves_pythons_collection_on(
    at: str, fake: FakeCuda, graphs: FakeGraphs
) -> None:
    """Just after collections are off, and before they are on again."""
    driver = Recorded(torch.device("cuda"))
    driver.begin()
    compute = driver.stream("compute")
    owner: Any = torch.cuda if at == "set_stream" else gc
    call = getattr(owner, at)

    def struck(*args: Any) -> None:
        if at == "disable":
            call()
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if at == "disable":
            patch.setattr(owner, at, struck)
        driver.begin_capture(compute)
        patch.setattr(owner, at, struck)
        driver.end_capture()
    driver.drop_capture()
    try:
        assert gc.isenabled()
    finally:
        gc.enable()
    driver.end()
    captured(driver)


@pytest.mark.parametrize("host_updates", [False, True])
@pytest.mark.parametrize("refused", ["", "begin", "end"])
def test_a_whole_step_is_replayed_or_the_loop_runs_it_and_it_is_said_why(
    host_updates: bool,
    refused: str,
    fake: FakeCuda,
    graphs: FakeGraphs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setattr(fake.Event, "synchronize", lambda event: None, raising=False)
    chains = importlib.import_module("stream_graphs")
    graph = chains.bound(chains.chain(host_updates=host_updates))
    tensors = graph.program.tensors
    plainly = chains.Plainly(graph, {k: v.clone() for k, v in tensors.items()})
    made = offload.plan(graph, smallest_budget(graph, 0)[0], placement="copy", recompute=False)
    graphs.refused = refused
    told: list[Any] = []
    with (
        pytest.MonkeyPatch.context() as patch,
        Runner(made, "cudagraph", driver=Recorded(torch.device("cuda"))) as runner,
    ):
        patch.setattr(
            "offload.running.binding.warnings.warn", lambda text, *a, **k: told.append(text)
        )
        for step in range(4):
            x = chains.batch(seed=step)
            assert torch.equal(runner(x)[0], plainly.step(x)[0])
            assert fake.current is fake.caller and gc.isenabled()
    assert all(torch.equal(tensors[k], plainly.held[k]) for k in tensors)
    said = f"cannot be captured: RuntimeError: CUDA error: {refused} is not permitted."
    assert [said in text for text in told] == ([True] if refused else [])
    assert ("replay" in fake.log) == (not refused)
    assert ("cannot be captured" in made.explain()) == bool(refused)


def test_torch_has_what_the_stand_in_has() -> None:
    assert issubclass(CudaStream, torch.cuda.Stream) and issubclass(CudaEvent, torch.cuda.Event)
    assert {"device", "priority"} <= inspect.signature(torch.cuda.Stream.__new__).parameters.keys()
    assert "enable_timing" in inspect.signature(torch.cuda.Event.__new__).parameters
    for name in ("wait_event", "synchronize"):
        assert callable(getattr(torch.cuda.Stream, name))
    for name in ("record", "wait", "query", "elapsed_time", "synchronize"):
        assert callable(getattr(torch.cuda.Event, name))
    names = ("set_stream", "set_device", "current_device", "current_stream", "_sleep")
    assert all(callable(getattr(torch.cuda, name)) for name in names)
    begin = inspect.signature(torch.cuda.CUDAGraph.capture_begin).parameters
    assert {"pool", "capture_error_mode"} <= begin.keys()
    assert all(
        callable(getattr(torch.cuda.CUDAGraph, n)) for n in ("capture_end", "replay", "reset")
    )
    assert all(
        callable(getattr(torch.Generator, n)) for n in ("clone_state", "graphsafe_set_state")
    )
    assert callable(torch.cuda.graph_pool_handle)
