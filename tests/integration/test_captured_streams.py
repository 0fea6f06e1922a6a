"""Engine `cudagraph` where streams are late and steps go wrong: the bits of program order.

A kernel's Python runs when it is captured, so what goes wrong in a replay is a function of the host
that the graph keeps.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from support import offload_lightning as ol
from support import stream_graphs as graphs
from support import stream_runs
from support.fake_gpu import (
    host_function,
    losable_device,
    lose_device,
    needs_held_streams,
    needs_late_streams,
    only_on_a_fake_gpu,
)
from support.graph_edits import with_task, without_edge
from support.products import every_pair
from support.stream_runs import CUDA, HELD, SHAPES, Bytes, ours, planned, smallest, works

from offload.errors import DeviceLost
from offload.graph.memgraph import TASK
from offload.graph.taskgraph import HOST
from offload.memory.arenas import HostArena
from offload.running.drivers.cuda_graph import GraphCuda
from offload.running.drivers.device_loss import device_lost
from offload.running.runner import Runner

pytestmark = pytest.mark.gpu


launches = ol.replayed
driver = partial(stream_runs.driver, kind=GraphCuda)


# ---- streams that are late ----------------------------------------------------------------------


@pytest.mark.parametrize("held, poison", every_pair(HELD, [False, True]))
def test_whatever_stream_of_a_graph_is_late_the_bits_are_those_of_program_order(
    held: str, poison: bool, launches: list[Any]
) -> None:
    for shape in SHAPES:
        graph = graphs.bound(graphs.chain(**shape), CUDA)
        tensors = graph.program.tensors
        for budget in (None, smallest(graph)):
            made, late = planned(graph, budget), driver(held)
            launches.clear()
            with Runner(made, "cudagraph", poison=poison, driver=late) as runner:
                for step in range(4):
                    assert works(runner, graph, tensors, step), (shape, step)
            assert len(launches) >= 3


@needs_held_streams
def test_every_edge_of_a_graph_is_needed_a_late_stream_shows_it(launches: list[Any]) -> None:
    """Taken away one by one: many of such graphs come to other bits when the stream that was waited
    for is late. Only what is replayed counts."""
    graph = graphs.bound(graphs.chain(2, wide=2048, thin=512), CUDA)
    tensors = graph.program.tensors
    made = planned(graph, smallest(graph))
    nodes = made.memgraph.nodes
    edges = [(n, d) for n, node in enumerate(nodes) for d in node.deps]
    crossing = [(n, d) for n, d in edges if nodes[n].lane != nodes[d].lane]
    wrong = 0
    for node, dep in crossing:
        broken = graphs.HandPlan(without_edge(made.memgraph, node, dep))
        late = driver(nodes[dep].lane)
        launches.clear()
        with Runner(broken, "cudagraph", poison=True, driver=late) as runner:
            runner(graphs.batch(512))
            wrong += not all(works(runner, graph, tensors, step) for step in range(2))
        assert launches
    assert len(crossing) > 10
    assert wrong > len(crossing) / 3, f"{wrong} of {len(crossing)}"


# ---- what happens in a replay: its end, an exception, a device that is gone --------------------

LATE_SECONDS = 0.2
struck: list[Callable[[], object]] = []
"""What the next replay does: once."""


def strike() -> None:
    while struck:
        struck.pop()()


def striking(task: str, **shape: Any) -> Any:
    """A chain in which one task can go wrong in a replay."""
    graph = graphs.chain(**shape)
    [kernel] = [t.kernel for t in graph.tasks if t.name == task]

    def run(reads: Bytes, writes: Bytes) -> None:
        host_function(strike)
        kernel(reads, writes)

    graph = with_task(graph, task, kernel=run)
    return graph


@needs_late_streams
def test_when_a_captured_step_returns_its_copies_are_over(launches: list[Any]) -> None:
    """The caller may write to host memory at once."""
    over: list[bool] = []

    def be_late() -> None:
        time.sleep(LATE_SECONDS)
        over.append(True)

    graph = graphs.bound(striking("update0"), CUDA)
    made = planned(graph, smallest(graph) + 2048)
    assert made.memgraph.ends[graph.outputs[0]].arena != HOST, "to read the loss would wait, too"
    assert any(node.kind != TASK for node in made.memgraph.nodes)
    with Runner(made, "cudagraph") as runner:
        runner(graphs.batch())
        runner(graphs.batch())
        struck.append(be_late)
        runner(graphs.batch())
        assert len(launches) == 2 and over


@only_on_a_fake_gpu("the test loses the device")
@pytest.mark.parametrize("hosted", [False, True])
def test_a_device_that_is_lost_in_mid_replay_is_one_clear_error(
    hosted: bool, launches: list[Any]
) -> None:
    graph = graphs.bound(striking("backward1", host_updates=hosted), CUDA)
    tensors = graph.program.tensors
    runner = Runner(planned(graph, smallest(graph)), "cudagraph")
    assert all(works(runner, graph, tensors, step) for step in range(3))
    launches.clear()
    struck.append(lose_device)
    with losable_device():
        with pytest.raises((DeviceLost, RuntimeError)) as raised:
            for _ in range(2):  # it may be told late
                runner(graphs.batch())
        assert launches and not struck
        lost = device_lost(raised.value, CUDA)
        assert lost and "illegal memory access" in str(lost.__cause__)
        with pytest.raises(DeviceLost, match="last checkpoint"):
            runner(graphs.batch())
        runner.abandon()
    assert ours() == []


# ---- memory that a graph cannot copy ------------------------------------------------------------


def test_where_nothing_was_page_locked_the_loop_runs_the_step_and_it_is_said_why(
    launches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostArena, "note", "12 MiB of host memory could not be page-locked")
    graph = graphs.bound(graphs.chain(), CUDA)
    tensors = graph.program.tensors
    made = planned(graph, smallest(graph))
    with (
        pytest.warns(
            RuntimeWarning, match=r"captured: .*only page-locked.*Engine cuda runs"
        ) as told,
        Runner(made, "cudagraph") as runner,
    ):
        assert all(works(runner, graph, tensors, step) for step in range(4))
    assert len(told) == 1 and not launches
    assert "could not be page-locked" in made.explain()
    assert "cannot be captured" in made.explain()
