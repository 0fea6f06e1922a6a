"""A runner over hand-made graphs: lanes, batches and outputs, and what it refuses."""

import copy
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import stream_graphs as graphs
from support.stream_runs import planned
from torch import nn

import offload
from offload.errors import GraphError, OffloadError, StepError
from offload.graph.builder import GraphBuilder
from offload.graph.taskgraph import HOST, TaskGraph
from offload.live.function_capture import capture
from offload.planning.refusal import smallest_budget
from offload.plans.plan import plan
from offload.running.runner import Runner

ENGINES = ("serial", "threads")
Bytes = Sequence[torch.Tensor]
WAIT = 20.0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("poison", [False, True])
def test_poison_shows_a_use_after_free(engine: str, poison: bool) -> None:
    builder = GraphBuilder()
    a, b, c = (builder.buffer(name, 64, "activation") for name in "abc")
    builder.task("make", [], [a], kernel=lambda reads, writes: writes[0].fill_(5))
    builder.task("use", [a], [b], kernel=lambda reads, writes: writes[0].copy_(reads[0]))
    builder.task("late", [a, b], [c], kernel=lambda reads, writes: writes[0].copy_(reads[0]))
    builder.output(c)
    graph = graphs.bound(builder.graph())
    made = planned(graph).memgraph
    early = tuple(
        replace(block, nodes=(0, 1)) if block.buffer == a else block for block in made.blocks
    )
    with Runner(graphs.HandPlan(replace(made, blocks=early)), engine, poison=poison) as runner:
        assert set(runner()[0].tolist()) == ({0xFF} if poison else {5})


def test_host_workers_run_at_the_same_time_and_beside_compute() -> None:
    together = threading.Barrier(3)
    builder = GraphBuilder()

    def meet(reads: Bytes, writes: Bytes) -> None:
        together.wait(WAIT)

    for name, lane in (("h0", "host"), ("h1", "host"), ("c", "compute")):
        made = builder.buffer(name, 64)
        builder.task(name, [], [made], lane=lane, kernel=meet)
        builder.output(made)
    graph = graphs.bound(builder.graph())
    with Runner(planned(graph), "threads", host_workers=2) as runner:
        runner()
        assert {span.row for span in runner.trace.spans} == {"compute", "host-0", "host-1"}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_lane_runs_one_node_at_a_time(engine: str) -> None:
    inside = 0
    builder = GraphBuilder()

    def alone(reads: Bytes, writes: Bytes) -> None:
        nonlocal inside
        inside += 1
        writes[0].copy_(torch.arange(1 << 16).to(torch.uint8))  # lets go of the interpreter
        assert inside == 1
        inside -= 1

    for n in range(40):
        made = builder.buffer(f"h{n}", 1 << 16)
        builder.task(f"h{n}", [], [made], lane="host", kernel=alone)
    graph = graphs.bound(builder.graph())
    with Runner(planned(graph), engine, "random") as runner:
        runner()


def test_a_step_that_is_added_anew_takes_the_place_of_the_first_one() -> None:
    x = torch.ones(4)
    with Runner(plan(capture(lambda x: (x * 1,), x))) as runner:
        for times in (2, 3):
            runner.add("step", capture(lambda x, by=times: (x * by,), x))
            assert torch.equal(runner.run("step", x)[0], times * x)
        with pytest.raises(StepError, match="no step 'other': add"):
            runner.run("other", x)


def test_arenas_larger_than_the_machine_are_refused_before_anything_moves() -> None:
    graph = graphs.bound(graphs.chain(1))
    tensors = graph.program.tensors
    made = planned(graph).memgraph
    at = tensors["w0"].data_ptr()
    for arena in (0, HOST):
        huge = replace(made, arenas={**made.arenas, arena: 1 << 50})
        with pytest.raises(OffloadError, match=r"1024\.0 TiB of memory are needed, but only "):
            Runner(graphs.HandPlan(huge))
    assert tensors["w0"].data_ptr() == at


def test_a_task_that_writes_without_a_kernel_is_refused_before_a_step() -> None:
    builder = GraphBuilder()
    builder.task("forgotten", writes=[made := builder.buffer("made", 64)])
    builder.output(made)
    graph = builder.graph()
    with pytest.raises(GraphError, match="forgotten writes buffers but has no kernel"):
        Runner(plan(graph, placement="copy"))


@pytest.mark.parametrize("engine", ENGINES)
def test_outputs_are_a_tuple_of_new_tensors(engine: str) -> None:
    graph = graphs.bound(graphs.chain(2))
    with Runner(planned(graph), engine) as runner:
        first = runner(graphs.batch())
        kept = first[0].clone()
        second = runner(graphs.batch())
        assert isinstance(first, tuple)
        assert torch.equal(first[0], kept) and not torch.equal(first[0], second[0])
        assert first[0].untyped_storage().nbytes() == 64
        first[0].zero_()
        assert second[0].any()


def test_what_is_no_tensor_comes_out_as_it_is_and_nested_outputs_are_flat() -> None:
    graph = graphs.bound(graphs.chain(1))
    value = graph.program.outputs[0]
    outputs = (value, {"loss": value, "epoch": 3}, None)
    graph = replace(graph, program=replace(graph.program, outputs=outputs))
    with Runner(planned(graph), "serial") as runner:
        loss, again, epoch, nothing = runner(graphs.batch())
    assert torch.equal(loss, again) and epoch == 3 and nothing is None


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ((), "0 tensors were given; the step takes 1"),
        ((torch.zeros(640), torch.zeros(1)), "2 tensors were given; the step takes 1"),
        ((torch.zeros(640),), "input 0 is torch.float32 on cpu; torch.uint8 on cpu is expected"),
        ((torch.zeros(640, device="meta"),), "on meta"),
        (([1] * 640,), "input 0 is a list; a tensor is expected"),
        ((torch.zeros(641, dtype=torch.uint8),), r"inputs of shape \(\(640,\),\)"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_and_the_next_one_runs(
    batch: tuple[Any, ...], said: str
) -> None:
    graph = graphs.bound(graphs.chain(1))
    tensors = graph.program.tensors
    before = tensors["w0"].clone()
    with Runner(planned(graph), "serial") as runner:
        with pytest.raises(StepError, match=said):
            runner(*batch)
        assert torch.equal(tensors["w0"], before)
        runner(graphs.batch())
        assert not torch.equal(tensors["w0"], before)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("other", [40, 400])
def test_a_batch_of_another_shape_is_captured_once_and_works_on_the_same_tensors(
    engine: str, other: int
) -> None:
    """A smaller one shares the arenas; a larger one makes them anew."""
    captured: list[int] = []
    tensors = {"w": torch.arange(128, dtype=torch.uint8)}
    held = {"w": tensors["w"].clone()}

    def graph_for(nbytes: int) -> TaskGraph:
        builder = GraphBuilder()
        x, w = builder.buffer("x", nbytes, "input"), builder.buffer("w", 128, "parameter")
        y = builder.buffer("y", nbytes)
        builder.task("forward", [x, w], [y], kernel=graphs.mixed(1))
        builder.task("update", [y, w], [w], kernel=graphs.mixed(2))
        builder.output(y)
        graph = graphs.bound(builder.graph())
        program = replace(graph.program, tensors=tensors, recapture=recapture)
        return replace(graph, program=program)

    def recapture(*batch: torch.Tensor) -> TaskGraph:
        assert torch.is_grad_enabled()
        captured.append(batch[0].numel())
        return graph_for(batch[0].numel())

    with Runner(planned(graph_for(160)), engine, poison=True) as runner:
        for step, nbytes in enumerate((160, other, 160, other, other, 160)):
            x = graphs.batch(nbytes, step)
            [expected] = graphs.Plainly(graph_for(nbytes), held).step(x)
            assert torch.equal(runner(x)[0], expected)
            assert torch.equal(tensors["w"], held["w"])
    assert captured == [other]


def test_a_larger_batch_is_planned_though_what_stays_on_the_device_is_in_its_way() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(32, 32), nn.ReLU())))
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    twin = copy.deepcopy(net)
    for p in twin.parameters():
        p.grad = torch.zeros_like(p)

    def step(x: torch.Tensor, of: nn.Module = net) -> torch.Tensor:
        loss = of(x).square().mean()
        loss.backward()
        return loss.detach()

    small, large = (torch.randn(n, 32) for n in (4, 512))
    both = [offload.capture(step, x) for x in (small, large)]
    made = offload.plan(both[0], max(smallest_budget(graph, 0)[0] for graph in both))
    stays = [b for b, place in made.memgraph.starts.items() if place.arena != HOST]
    assert any(made.graph.buffers[b].persistent for b in stays), "nothing is in the way"
    with Runner(made) as runner:
        for x in (small, large, large, small, large, small):
            assert torch.equal(runner(x)[0], step(x, twin))
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
