"""Dropout on several GPUs: the bits of one, and no device waits for another one's draws."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.fake_gpu import only_on_a_fake_gpu
from support.placed_training import PlacingPlanner
from support.products import every_value
from torch import nn
from torch.nn import functional

from offload import GraphBuilder, Plan, TaskGraph
from offload.errors import StepError
from offload.live.session import LiveSession
from offload.measuring.profiling import measure_tasks
from offload.program.generators import default_generator, draws_at_a_place
from offload.program.kernels import Call, Calls, Program, Value

pytestmark = pytest.mark.gpu
FAKE_KERNELS = only_on_a_fake_gpu("kernels of a GPU add in any order")
CUDA = torch.device("cuda", 0)
WIDTH, MICRO_BATCHES, STEPS = 32, 3, 3
Batches = list[list[tuple[torch.Tensor, torch.Tensor]]]


class Dropping(nn.Module):
    """Dropout in every layer, of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            kept = functional.dropout(layer(x).relu(), 0.2)
            x = x + (kept * torch.rand_like(kept) if number % 2 else kept)
        return x


def made() -> tuple[Dropping, torch.optim.Optimizer, Batches]:
    torch.manual_seed(5)
    model = Dropping().cuda()
    batches = [
        [(torch.randn(4, WIDTH).cuda(), torch.randn(4, WIDTH).cuda()) for _ in range(MICRO_BATCHES)]
        for _ in range(STEPS)
    ]
    torch.manual_seed(6)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), batches


def add_gradients(model: nn.Module, batches: Any) -> list[torch.Tensor]:
    losses: list[torch.Tensor] = []
    for x, y in batches:
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        losses.append(loss.detach())
    return losses


def states() -> list[torch.Tensor]:
    return [torch.cuda.get_rng_state(n) for n in range(torch.cuda.device_count())]


def train_eagerly() -> Iterator[list[torch.Tensor]]:
    """After each step: all weights, losses and states of generators."""
    model, optimizer, batches = made()
    for batch in batches:
        losses = add_gradients(model, batch)
        optimizer.step()
        optimizer.zero_grad()
        yield copy.deepcopy([*model.state_dict().values(), *losses, *states()])


def train(planner: PlacingPlanner) -> Iterator[list[torch.Tensor]]:
    """The same by the planner's plans."""
    model, optimizer, batches = made()
    with LiveSession(model, optimizer, budget="100%", device=CUDA, planner=planner) as session:
        for batch in batches:
            with session.step():
                losses = add_gradients(model, batch)
                optimizer.step()
                optimizer.zero_grad()
            found = [*model.state_dict().values(), *losses]
            yield [tensor.cpu().clone() for tensor in found] + states()


def planner_of(devices: int, chunks: int = 1, share: float = 1.0, **how: Any) -> PlacingPlanner:
    if torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} devices; the fake GPU has FAKE_CUDA_DEVICES")
    return PlacingPlanner(devices, chunks, share, **{"engine": "cuda", "poison": True, **how})


@FAKE_KERNELS
@pytest.mark.parametrize(
    "devices, chunks, share, order",
    every_value([1, 2, 4], [1, 2], [1.0, 0.4, 0.0], ["priority", "random"]),
)
def test_each_device_draws_what_one_would_have_drawn(
    devices: int, chunks: int, share: float, order: str
) -> None:
    expected = list(train_eagerly())
    planner = planner_of(devices, chunks, share, order=order, seed=devices)
    for theirs, ours in zip(expected, train(planner), strict=True):
        assert all(torch.equal(one.cpu(), other) for one, other in zip(theirs, ours, strict=True))
    graph = plan_of(planner).graph
    assert len(graph.devices) == devices
    drawing = [task for task in graph.tasks if task.random]
    assert len(drawing) == MICRO_BATCHES * 12
    assert all(draws_at_a_place(task.kernel.calls) == (devices > 1) for task in drawing)


@FAKE_KERNELS
def test_a_step_that_draws_on_several_devices_is_not_captured() -> None:
    planner = planner_of(2, engine="cudagraph")
    expected = list(train_eagerly())
    with pytest.warns(RuntimeWarning, match="draws on several devices .* Engine cuda runs it"):
        found = list(train(planner))
    for theirs, ours in zip(expected, found, strict=True):
        assert all(torch.equal(one.cpu(), other) for one, other in zip(theirs, ours, strict=True))


def plan_of(planner: PlacingPlanner) -> Plan:
    assert planner.last is not None
    return planner.last


def find_ancestors(needed: Any) -> list[set[int]]:
    found: list[set[int]] = []
    for before in needed:
        found.append({*before}.union(*(found[other] for other in before)))
    return found


@pytest.mark.parametrize("devices", [2, 4])
def test_no_forward_pass_waits_for_another_devices_draws(devices: int) -> None:
    planner = planner_of(devices, share=8.0)
    list(train(planner))
    made = plan_of(planner)
    tasks, count = made.graph.tasks, 0
    for number, before in enumerate(find_ancestors(made.graph.dependencies())):
        if tasks[number].device == 0 and tasks[number].phase == "forward":
            assert {tasks[other].device for other in before} <= {0}
            count += tasks[number].turn > 0 and tasks[number].random
    assert count >= MICRO_BATCHES - 1, "draws of the first device's forward passes"
    nodes = made.memgraph.nodes
    for number, before in enumerate(find_ancestors(node.deps for node in nodes)):
        task = tasks[nodes[number].task]
        if nodes[number].lane == "compute" and (task.phase, task.turn) == ("forward", 1):
            lanes = {nodes[other].lane for other in before}
            assert {lane for lane in lanes if lane.startswith("compute")} <= {"compute"}


def test_a_draw_of_another_length_than_was_measured_is_an_error() -> None:
    class Wrong(PlacingPlanner):
        def place(self, graph: TaskGraph, homes: Any) -> TaskGraph:
            tasks = list(graph.tasks)
            number = [n for n, task in enumerate(tasks) if task.random][4]
            calls = [replace(call, advance=8) for call in tasks[number].kernel.calls]
            tasks[number] = replace(tasks[number], kernel=Calls(tuple(calls)))
            return super().place(graph.with_tasks(tasks), homes)

    planner_of(2)
    before = torch.cuda.get_rng_state(1)
    with pytest.raises(StepError, match=r"moved the random generator to 20 .* and 24 was found"):
        next(train(Wrong(2, 1, 1.0, engine="cuda")))
    assert torch.equal(torch.cuda.get_rng_state(1), before)


# ---- how far kernels move a generator on --------------------------------------------------------

aten = torch.ops.aten
ROWS = Value(0, torch.float32, (1 << 12, 1 << 6), (1 << 6, 1))
HEADS = Value(0, torch.float16, (2, 4, 128, 32), (4 * 128 * 32, 128 * 32, 32, 1))


@pytest.mark.parametrize(
    "op, args",
    [
        (aten.native_dropout.default, (ROWS, 0.3, True)),
        (aten.rand_like.default, (ROWS,)),
        (aten.randn_like.default, (ROWS,)),
        (aten.bernoulli_.float, (ROWS, 0.2)),
        (aten.exponential_.default, (ROWS,)),
        (aten.randperm.default, (1000,)),
        (aten.mul.Tensor, (ROWS, ROWS)),
        (aten._scaled_dot_product_flash_attention.default, (HEADS, HEADS, HEADS, 0.1, True)),
        (aten._scaled_dot_product_flash_attention.default, (HEADS, HEADS, HEADS, 0.0, True)),
    ],
)
def test_it_is_measured_how_far_a_kernel_moves_the_generator_on(op: Any, args: Any) -> None:
    tensors = [
        torch.ones(arg.size, dtype=arg.dtype, device="cuda") if isinstance(arg, Value) else arg
        for arg in args
    ]
    where: Any = {"device": CUDA} if op is aten.randperm.default else {}
    torch.cuda.manual_seed(9)
    try:
        op(*tensors, **where)
    except NotImplementedError as error:
        pytest.skip(str(error))
    moved = default_generator(CUDA).get_offset()
    builder = GraphBuilder()
    builder.buffer("given", 1 << 20, "parameter")
    builder.task("drawing", [0], [0], kernel=Call(op, args, where), random=True)
    graph = replace(builder.graph(), program=Program((), (), {}, device=CUDA))
    state = torch.cuda.get_rng_state(0)
    assert measure_tasks(graph).tasks[0].kernel.advance == moved
    assert torch.equal(torch.cuda.get_rng_state(0), state)


def test_it_is_unknown_how_far_a_seeding_kernel_moves_the_generator_on() -> None:
    for op, args, given in (
        (torch.ops.offload_live.begin_lane.default, (3,), {}),
        (aten.rand.generator, ([8],), {"generator": torch.Generator(CUDA), "device": CUDA}),
        (torch.rand, (8,), {"device": CUDA}),
    ):
        builder = GraphBuilder()
        builder.task("drawing", [], [], kernel=Call(op, args, given), random=True)
        graph = replace(builder.graph(), program=Program((), (), {}, device=CUDA))
        assert measure_tasks(graph).tasks[0].kernel.advance is None
