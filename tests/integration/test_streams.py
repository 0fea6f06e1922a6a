"""Engine `cuda` over streams: the bits of program order, whatever a stream is late for.

Every test that computes runs on the CPU's twin, and, marked `gpu`, on a device.
"""

import gc
import threading
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from graph_edits import with_task, without_edge
from products import every_pair
from support import stream_graphs as graphs
from support.stream_runs import HELD, Bytes, driver, faulty, ours, planned, same, smallest

from benchmarks.twins.twin_streams import Twin
from offload.errors import OffloadError, RaceFound, StepError
from offload.graph.memgraph import TASK
from offload.planning.issue import DEPTH
from offload.planning.verify import verify
from offload.running.runner import Runner

NO_DEVICE = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ("cpu", pytest.param("cuda", marks=(pytest.mark.gpu, NO_DEVICE)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "held, order, poison", every_pair(HELD, ["priority", "random"], [False, True])
)
def test_whatever_stream_is_late_the_bits_are_those_of_program_order(
    device: str, held: str, order: str, poison: bool
) -> None:
    for shape in ({"thin": 4096}, {"wide": 1 << 16, "thin": 64}, {"host_updates": True}):
        graph = graphs.bound(graphs.chain(**shape), device)
        tensors = graph.program.tensors
        plainly = graphs.Plainly(graph, {k: v.cpu().clone() for k, v in tensors.items()})
        x = graph.buffers[0].nbytes
        for budget in (None, smallest(graph)):
            made = planned(graph, budget)
            with Runner(
                made, "cuda", order, 3, poison=poison, driver=driver(device, held)
            ) as runner:
                for step in range(4):
                    assert same(runner, plainly, tensors, graphs.batch(x, step)), (shape, step)


# ---- what keeps the edges, and what happens without one -----------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_every_edge_between_streams_is_needed_a_late_stream_shows_it(device: str) -> None:
    """Taken away one by one: the proof refuses each such plan, and most of them come to other bits
    when the stream that was waited for is late."""
    graph = graphs.bound(graphs.chain(3, wide=2048, thin=512), device)
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
        with Runner(
            graphs.HandPlan(broken), "cuda", poison=True, driver=driver(device, held)
        ) as runner:
            wrong += not all(
                same(runner, plainly, tensors, graphs.batch(512, step)) for step in range(2)
            )
    assert len(crossing) > 10
    assert wrong > len(crossing) / 2, f"{wrong} of {len(crossing)}"


class Deaf:
    """A driver that leaves out the n-th wait for an event."""

    def __init__(self, inner: Any, leave_out: int) -> None:
        self.inner, self.left = inner, leave_out

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def wait(self, stream: Any, event: Any) -> None:
        self.left -= 1
        if self.left != 0:
            self.inner.wait(stream, event)


def test_a_wait_that_is_left_out_makes_the_result_wrong_when_a_stream_is_late() -> None:
    graph = graphs.bound(graphs.chain(3, wide=2048, thin=512))
    tensors = graph.program.tensors
    made = planned(graph, smallest(graph))
    wrong = 0
    for held in HELD[1:]:
        for leave_out in (0, *range(1, 9)):
            plainly = graphs.Plainly(graph, {k: v.clone() for k, v in tensors.items()})
            deaf = Deaf(Twin((held,)), leave_out)
            with Runner(made, "cuda", poison=True, driver=deaf) as runner:
                right = same(runner, plainly, tensors, graphs.batch(512))
            assert right or leave_out, "nothing was left out"
            wrong += not right
    assert wrong >= 5


def test_the_host_never_has_more_than_its_depth_on_a_stream() -> None:
    """And it does have several: the first nodes of a stream that is held up are all there."""
    depth, most = DEPTH, 0
    gate = threading.Event()

    class Counting(Twin):
        def enqueue(self, stream: Any, run: Any) -> None:
            nonlocal most
            super().enqueue(stream, run)
            # The stream's thread takes from the queue.
            with self._state.lock:  # pyright: ignore[reportPrivateUsage]
                waiting = sum(not hasattr(item, "ticket") for item in stream.queue)
                most = max(most, sum(callable(item) for item in stream.queue) + stream.busy)
            if waiting and stream.lane == "compute" and most >= depth - 1:
                gate.set()

    graph = graphs.chain(6)
    first = graph.tasks[0].kernel

    def slow(reads: Bytes, writes: Bytes) -> None:
        assert gate.wait(60)
        first(reads, writes)

    graph = graphs.bound(with_task(graph, "forward0", kernel=slow))
    tensors = graph.program.tensors
    plainly = graphs.Plainly(graph, {k: v.clone() for k, v in tensors.items()})
    with Runner(planned(graph, smallest(graph)), "cuda", driver=Counting()) as runner:
        x = graphs.batch()
        [found] = runner(x)
    assert torch.equal(found, plainly.step(x)[0])
    assert most == depth


# ---- what a runner is asked for, its end, its trace ---------------------------------------------


def test_without_a_device_engine_cuda_says_so_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def arenas(sizes: Any) -> Any:
        raise AssertionError("allocated")

    monkeypatch.setattr("offload.running.stage.DeviceArena", arenas)
    graph = graphs.bound(graphs.chain())
    with pytest.raises(OffloadError, match="captured on a cuda device, not on cpu"):
        Runner(planned(graph), "cuda")
    there = replace(graph, program=replace(graph.program, device=torch.device("cuda")))
    if not torch.backends.cuda.is_built():
        with pytest.raises(OffloadError, match=r"PyTorch \(.*\) is built without CUDA"):
            Runner(planned(there), "cuda")
    with pytest.raises(OffloadError, match="'serial' runs on the CPU, but this step"):
        Runner(planned(there), "serial")
    with pytest.raises(ValueError, match="'threads' has no use for a driver"):
        Runner(planned(graph), "threads", driver=Twin())


def test_close_ends_all_threads_and_a_closed_runner_says_so() -> None:
    graph = graphs.bound(graphs.chain(host_updates=True))
    runner = Runner(planned(graph, smallest(graph)), "cuda", driver=Twin())
    runner(graphs.batch())
    names = {"stream-compute", "stream-h2d", "stream-d2h", "host"}
    assert {name.removeprefix("perfect-offload-") for name in ours()} >= names
    runner.close()
    runner.close()
    assert ours() == []
    with pytest.raises(StepError, match="closed"):
        runner(graphs.batch())


def test_a_runner_that_is_dropped_ends_its_threads_and_frees_its_arenas() -> None:
    graph = graphs.bound(graphs.chain(host_updates=True))
    runner = Runner(planned(graph, smallest(graph)), "cuda", driver=Twin())
    runner(graphs.batch())
    mine = [t for t in threading.enumerate() if t.name.startswith("perfect-offload")]
    arenas, gone = weakref.ref(runner._memory.arenas), weakref.ref(runner)
    del runner
    gc.collect()
    assert gone() is None and arenas() is None
    for thread in mine:
        thread.join(60)
    assert mine and ours() == []


@pytest.mark.parametrize("device", DEVICES)
def test_a_trace_has_the_hosts_times_until_it_is_asked_for_the_nodes_own(device: str) -> None:
    graph = graphs.bound(graphs.chain(host_updates=True), device)
    made = planned(graph, smallest(graph))
    with Runner(made, "cuda", driver=driver(device)) as runner:
        x = graphs.batch().to(device)
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


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_where_nothing_moves_waits_for_its_inputs_alone(device: str) -> None:
    """Once the copies of a step are enqueued, the rest is, without a look at the device."""
    graph = graphs.bound(graphs.chain(8), device)
    tensors = graph.program.tensors
    plainly = graphs.Plainly(graph, {k: v.cpu().clone() for k, v in tensors.items()})
    with Runner(planned(graph), "cuda", driver=driver(device)) as runner:
        assert same(runner, plainly, tensors, graphs.batch())
        assert len(runner.stage.engine._events) == 1  # type: ignore[union-attr]


def test_when_a_step_returns_its_copies_are_over_and_kernels_may_still_run() -> None:
    """The caller may write to host memory at once, and the host is not held up by a kernel."""

    class Loose(Twin):
        """The caller's stream waits, not the host: as on a device."""

        def end(self) -> None:
            pass

    gate = threading.Event()
    graph, last = faulty("update0")
    last.before = lambda: gate.wait(60)
    graph = graphs.bound(graph)
    tensors = graph.program.tensors
    plainly = graphs.Plainly(graph, {k: v.clone() for k, v in tensors.items()})
    loose = Loose(("h2d",))
    with Runner(planned(graph), "cuda", driver=loose) as runner:
        x = graphs.batch()
        runner(x)
        assert loose.stream("h2d").over and not loose.stream("compute").over
        gate.set()
        loose.synchronize()
        plainly.step(x)
        assert all(torch.equal(tensors[k], plainly.held[k]) for k in tensors)
