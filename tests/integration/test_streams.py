"""Engine `cuda` over streams: the bits of program order, whatever a stream is late for.

A stream of the fake GPU is late with FAKE_CUDA_ASYNC=1 (fakecuda/).
"""

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import stream_graphs as graphs
from support.fake_gpu import host_function, needs_late_streams
from support.graph_edits import without_edge
from support.products import every_pair
from support.stream_runs import (
    CUDA,
    HELD,
    SHAPES,
    driver,
    faulty,
    planned,
    same,
    smallest,
)

from offload.errors import OffloadError, RaceFound
from offload.graph.memgraph import TASK
from offload.memory.arenas import Arenas
from offload.planning.verify import verify
from offload.running.runner import Runner

LATE_SECONDS = 0.02


def be_late() -> None:
    """The current stream does nothing for a while."""
    host_function(lambda: time.sleep(LATE_SECONDS))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "held, order, poison", every_pair(HELD, ["priority", "random"], [False, True])
)
def test_whatever_stream_is_late_the_bits_are_those_of_program_order(
    held: str, order: str, poison: bool
) -> None:
    for shape in SHAPES:
        graph = graphs.bound(graphs.chain(**shape), CUDA)
        tensors = graph.program.tensors
        plainly = graphs.Plainly(graph, {k: v.cpu().clone() for k, v in tensors.items()})
        x = graph.buffers[0].nbytes
        for budget in (None, smallest(graph)):
            made = planned(graph, budget)
            with Runner(made, "cuda", order, 3, poison=poison, driver=driver(held)) as runner:
                for step in range(4):
                    assert same(runner, plainly, tensors, graphs.batch(x, step)), (shape, step)


# ---- what keeps the edges, and what happens without one -----------------------------------------


@pytest.mark.gpu
def test_every_edge_between_streams_is_needed_a_late_stream_shows_it() -> None:
    """Taken away one by one: the proof refuses each such plan, and most of them come to other bits
    when the stream that was waited for is late."""
    graph = graphs.bound(graphs.chain(3, wide=2048, thin=512), CUDA)
    tensors = graph.program.tensors
    made = planned(graph, smallest(graph))
    nodes = made.memgraph.nodes
    edges = [(n, d) for n, node in enumerate(nodes) for d in node.deps]
    crossing = [(n, d) for n, d in edges if nodes[n].lane != nodes[d].lane]
    wrong = 0
    for node, dep in crossing:
        broken = without_edge(made.memgraph, node, dep)
        with pytest.raises(RaceFound):
            verify(broken)
        plainly = graphs.Plainly(graph, {k: v.cpu().clone() for k, v in tensors.items()})
        held = nodes[dep].lane
        with Runner(graphs.HandPlan(broken), "cuda", poison=True, driver=driver(held)) as runner:
            wrong += not all(
                same(runner, plainly, tensors, graphs.batch(512, step)) for step in range(2)
            )
    assert len(crossing) > 10
    assert wrong > len(crossing) / 2, f"{wrong} of {len(crossing)}"


# ---- what a runner is asked for, its end, its trace ---------------------------------------------


def test_without_a_device_engine_cuda_says_so_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def arenas(sizes: Any) -> Any:
        raise AssertionError("allocated")

    monkeypatch.setattr("offload.running.stage.DeviceArena", arenas)
    graph = graphs.bound(graphs.chain())
    for engine in ("cuda", "cudagraph"):
        with pytest.raises(OffloadError, match="captured on a cuda device, not on cpu"):
            Runner(planned(graph), engine)
    there = replace(graph, program=replace(graph.program, device=torch.device("cuda")))
    if not torch.backends.cuda.is_built():
        with pytest.raises(OffloadError, match=r"PyTorch \(.*\) is built without CUDA"):
            Runner(planned(there), "cuda")
    with pytest.raises(OffloadError, match="'serial' runs on the CPU, but this step"):
        Runner(planned(there), "serial")
    with pytest.raises(ValueError, match="'threads' takes no driver"):
        Runner(planned(graph), "threads", driver=object())  # pyright: ignore[reportArgumentType]


@pytest.mark.gpu
def test_a_trace_has_the_hosts_times_until_it_is_asked_for_the_nodes_own() -> None:
    graph = graphs.bound(graphs.chain(host_updates=True), CUDA)
    made = planned(graph, smallest(graph))
    with Runner(made, "cuda", driver=driver()) as runner:
        x = graphs.batch().to(CUDA)
        runner(x)
        assert not runner.trace.timed
        assert len(runner.trace.spans) == len(made.memgraph.nodes)
        runner.measure()
        runner(x)
        trace = runner.trace
        assert trace.timed and trace.waited >= 0
        nodes = made.memgraph.nodes
        ran = [span for span in trace.spans if nodes[span.node].kind == TASK]
        assert {nodes[span.node].task for span in ran} == set(range(len(graph.tasks)))
        assert all(span.seconds > 0 for span in ran)
        end = {span.node: span.end for span in trace.spans}
        start = {span.node: span.start for span in trace.spans}
        streams = [n for n, node in enumerate(made.memgraph.nodes) if node.lane != "host"]
        for n in streams:
            for dep in set(made.memgraph.nodes[n].deps).intersection(streams):
                assert end[dep] <= start[n] + 1e-5
        runner.measure(False)
        runner(x)
        assert not runner.trace.timed


@pytest.mark.gpu
@needs_late_streams
def test_when_a_step_returns_its_copies_are_over_and_kernels_may_still_run() -> None:
    """The caller may write to host memory at once, and the host is not held up by a kernel."""
    gate = threading.Event()
    graph, last = faulty("update0")
    last.before = lambda: host_function(lambda: gate.wait(60))
    graph = graphs.bound(graph, CUDA)
    tensors = graph.program.tensors
    plainly = graphs.Plainly(graph, {k: v.cpu().clone() for k, v in tensors.items()})
    late = driver("h2d")
    with Runner(planned(graph), "cuda", driver=late) as runner:
        x = graphs.batch()
        given = x.clone()
        runner(x)
        assert not late.stream("compute").query()
        x.zero_()
        gate.set()
        late.synchronize()
        last.before = lambda: None
        plainly.step(given)
        assert all(torch.equal(tensors[k].cpu(), plainly.held[k]) for k in tensors)


# ---- memory of the host that a copy still uses --------------------------------------------------


@pytest.mark.gpu
@needs_late_streams
@pytest.mark.parametrize("way", ["park", "move"])
def test_a_tensor_that_comes_to_the_host_can_be_read_at_once(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = graphs.bound(graphs.chain(), CUDA)
    tensors, rest = graph.program.tensors, Arenas.synchronize

    def late_again(arenas: Arenas) -> None:
        rest(arenas)
        be_late()

    with Runner(planned(graph), "cuda", driver=driver()) as runner:
        runner(graphs.batch())
        expected = {key: tensor.to("cpu", copy=True) for key, tensor in tensors.items()}
        monkeypatch.setattr(Arenas, "synchronize", late_again)
        if way == "park":
            runner.park()
        else:
            runner.move_to(planned(graph, smallest(graph)))
        monkeypatch.undo()
        came = [key for key, tensor in tensors.items() if tensor.device.type == "cpu"]
        assert came
        assert all(torch.equal(tensors[key], expected[key]) for key in came)


@pytest.mark.gpu
@needs_late_streams
def test_memory_is_page_locked_until_a_copy_of_the_users_has_ended() -> None:
    """A streamed weight is page-locked, so `to(..., non_blocking=True)` returns before its end."""
    graph = graphs.bound(graphs.chain(host_updates=True), CUDA)
    tensors = graph.program.tensors
    with Runner(planned(graph, smallest(graph)), "cuda", driver=driver()) as runner:
        runner(graphs.batch())
        on_host = {k: tensor for k, tensor in tensors.items() if tensor.device.type == "cpu"}
        assert on_host
        expected = {key: tensor.clone() for key, tensor in on_host.items()}
        be_late()
        copies = {k: tensor.to(CUDA, non_blocking=True) for k, tensor in on_host.items()}
    assert all(torch.equal(copies[key].cpu(), expected[key]) for key in copies)
