"""What the driver that captures asks of torch.cuda's graphs, seen by a stand-in."""

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import stream_graphs as chains

import offload
from offload.planning.refusal import smallest_budget
from offload.running.drivers.cuda_graph import MODE, GraphCuda
from offload.running.runner import Runner

sys.path.insert(0, str(Path(__file__).parent))
import fake_cuda
from fake_cuda import FakeCuda

fake = fake_cuda.fake


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
    monkeypatch.setattr(fake.Event, "synchronize", lambda event: None, raising=False)
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
