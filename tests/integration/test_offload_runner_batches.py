"""What a runner takes and gives: batches of any shape and layout, and outputs of its own."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import offload_hand_made as hand
from torch import nn

import offload
from offload.errors import StepError
from offload.graph.builder import GraphBuilder
from offload.graph.taskgraph import HOST, TaskGraph
from offload.planning.refusal import smallest_budget
from offload.running.runner import Runner

ENGINES = ("serial", "threads")


def some(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.manual_seed(seed))


@pytest.mark.parametrize("engine", ENGINES)
def test_outputs_are_a_tuple_of_new_tensors(engine: str) -> None:
    graph = hand.bind(hand.layers(2), [0])
    with Runner(hand.planned(graph), engine) as runner:
        first = runner(some(640))
        kept = first[0].clone()
        second = runner(some(640))
        assert isinstance(first, tuple)
        assert torch.equal(first[0], kept) and not torch.equal(first[0], second[0])
        assert first[0].untyped_storage().nbytes() == 64
        first[0].zero_()
        assert second[0].any()


def test_what_is_no_tensor_comes_out_as_it_is_and_nested_outputs_are_flat() -> None:
    graph = hand.bind(hand.layers(1), [0])
    value = graph.program.outputs[0]
    outputs = (value, {"loss": value, "epoch": 3}, None)
    graph = replace(graph, program=replace(graph.program, outputs=outputs))
    with Runner(hand.planned(graph), "serial") as runner:
        loss, again, epoch, nothing = runner(some(640))
    assert torch.equal(loss, again) and epoch == 3 and nothing is None


def test_a_graph_without_a_program_takes_and_gives_bytes() -> None:
    builder = GraphBuilder()
    x = builder.buffer("x", 8, "input")
    total = builder.buffer("total", 8, "state")
    builder.task(
        "add",
        [x, total],
        [total],
        kernel=lambda reads, writes: writes[0].add_(reads[0]),
    )
    builder.output(total)
    graph = builder.graph()
    with Runner(hand.planned(graph), "serial") as runner:
        runner(torch.full((8,), 3, dtype=torch.uint8))
        assert runner(torch.full((8,), 4, dtype=torch.uint8))[0].tolist() == [7] * 8


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
    graph = hand.bind(hand.layers(1), [0])
    tensors = graph.program.tensors
    before = tensors["w0"].clone()
    with Runner(hand.planned(graph), "serial") as runner:
        with pytest.raises(StepError, match=said):
            runner(*batch)
        assert torch.equal(tensors["w0"], before)
        runner(some(640))
        assert not torch.equal(tensors["w0"], before)


def test_a_batch_may_lie_in_memory_as_it_likes() -> None:
    builder = GraphBuilder()
    x, y = builder.buffer("x", 64, "input"), builder.buffer("y", 64)
    builder.task("copy", [x], [y], kernel=lambda reads, writes: writes[0].copy_(reads[0]))
    builder.output(y)
    graph = hand.bind(builder.graph(), [0])
    with Runner(hand.planned(graph), "serial") as runner:
        every_third = some(192)[::3]
        assert torch.equal(runner(every_third)[0], every_third)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("other", [40, 400])
def test_a_batch_of_another_shape_is_captured_once_and_works_on_the_same_tensors(
    engine: str, other: int
) -> None:
    """A smaller one shares the arenas; a larger one makes them anew."""
    captured: list[int] = []
    tensors = {"w": hand.pattern("w", 128)}
    held = {"w": tensors["w"].clone()}

    def graph_for(nbytes: int) -> TaskGraph:
        builder = GraphBuilder()
        x, w = builder.buffer("x", nbytes, "input"), builder.buffer("w", 128, "parameter")
        y = builder.buffer("y", nbytes)
        builder.task("forward", [x, w], [y], kernel=hand.mix(1))
        builder.task("update", [y, w], [w], kernel=hand.mix(2))
        builder.output(y)
        graph = hand.bind(builder.graph(), [0], recapture=recapture)
        return replace(graph, program=replace(graph.program, tensors=tensors))

    def recapture(*batch: torch.Tensor) -> TaskGraph:
        assert torch.is_grad_enabled()
        captured.append(batch[0].numel())
        return graph_for(batch[0].numel())

    with Runner(hand.planned(graph_for(160)), engine, poison=True) as runner:
        for step, nbytes in enumerate((160, other, 160, other, other, 160)):
            x = some(nbytes, step)
            [expected] = hand.plainly(graph_for(nbytes), [x], held)
            assert torch.equal(runner(x)[0], expected)
            assert torch.equal(tensors["w"], held["w"])
    assert captured == [other]


def test_a_step_that_was_forgotten_must_be_added_again() -> None:
    total = torch.zeros(2)

    def step(x: torch.Tensor) -> torch.Tensor:
        return total.add_(x.sum())

    with Runner(offload.plan(offload.capture(step, torch.ones(3))), key="a") as runner:
        runner.add("b", offload.capture(step, torch.ones(2)))
        runner.run("b", torch.ones(2))
        runner.forget("b")
        with pytest.raises(StepError, match="no step 'b'"):
            runner.run("b", torch.ones(2))
        with pytest.raises(StepError, match="shape"):
            runner.run("a", torch.ones(2))
        runner.run("a", torch.ones(3))
    assert total.tolist() == [5, 5]


def test_numbers_written_in_a_step_are_those_of_its_batch() -> None:
    # Each shape has a literal of its own, of the same name and size.
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor(float(x.shape[0]))

    with Runner(offload.plan(offload.capture(step, torch.ones(2)))) as runner:
        for _ in range(2):
            for n in (2, 3, 5):
                assert torch.equal(runner(torch.ones(n))[0], torch.full((n,), float(n)))


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
    graphs = [offload.capture(step, x) for x in (small, large)]
    made = offload.plan(graphs[0], max(smallest_budget(graph, 0)[0] for graph in graphs))
    stays = [b for b, place in made.memgraph.starts.items() if place.arena != HOST]
    assert any(made.graph.buffers[b].persistent for b in stays), "nothing is in the way"
    with Runner(made) as runner:
        for x in (small, large, large, small, large, small):
            assert torch.equal(runner(x)[0], step(x, twin))
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
