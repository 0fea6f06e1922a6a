"""Updates that read their numbers from memory, against torch's own `optimizer.step()`."""

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from offload.graph.builder import GraphBuilder
from offload.graph.taskgraph import TaskGraph
from offload.optimizer.scalars import Scalars
from offload.optimizer.updates import advance, update_of
from offload.program.kernels import CPU, Call, Value

STEPS = 6
KINDS = {
    "sgd": lambda p, **more: SGD(p, 0.0312345, **more),
    "sgd momentum": lambda p, **more: SGD(p, 0.0312345, momentum=0.9, weight_decay=0.01, **more),
    "sgd nesterov": lambda p, **more: SGD(
        p, 0.0312345, momentum=0.9, nesterov=True, maximize=True, **more
    ),
    "adam": lambda p, **more: Adam(p, 0.00123, weight_decay=0.03, **more),
    "adam amsgrad": lambda p, **more: Adam(p, 0.00123, amsgrad=True, maximize=True, **more),
    "adamw": lambda p, **more: AdamW(p, 0.00123, betas=(0.85, 0.99), eps=1e-7, **more),
}

MOMENTUM = ("sgd momentum", "sgd nesterov")


def parameter(dtype: torch.dtype) -> torch.nn.Parameter:
    torch.manual_seed(3)
    return torch.nn.Parameter(torch.randn(4099, dtype=dtype))


def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(4)
    return [torch.randn(4099, dtype=dtype) for _ in range(STEPS)]


def graph_of(optimizer: Optimizer, p: torch.nn.Parameter) -> tuple[TaskGraph, Call]:
    """With one update as its only task."""
    update = update_of(optimizer, 0, p)
    values = [Value(n, p.dtype, (p.numel(),), (1,)) for n in range(2 + len(update.states))]
    call = Call(update, tuple(values))
    builder = GraphBuilder()
    buffers = [builder.buffer(f"b{value.buffer}", p.nbytes) for value in values]
    builder.task("update", buffers, buffers, kernel=call)
    graph = builder.graph()
    return graph, call


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_in_memory_give_the_bits_of_the_optimizers_own_step(
    kind: str, dtype: torch.dtype, fused: bool
) -> None:
    if fused and dtype == torch.bfloat16 and kind in MOMENTUM and torch.__version__ < "2.12":
        pytest.skip("torch's own fused SGD leaves the last bits of some elements to chance")
    ours, theirs = parameter(dtype), parameter(dtype)
    mine, optimizer = (KINDS[kind]([p], fused=fused) for p in (ours, theirs))
    graph, call = graph_of(mine, ours)
    scalars = Scalars.of(graph, CPU)
    assert scalars is not None
    update = scalars.bound(call).op
    after = advance(mine, [ours])
    for step, g in enumerate(gradients(dtype)):
        for group in (mine.param_groups[0], optimizer.param_groups[0]):
            group["lr"] *= 0.7 + 0.1 * step
        theirs.grad = g.clone()
        optimizer.step()
        scalars.refresh()
        states = [mine.state[ours][key] for key in update_of(mine, 0, ours).states]
        update(ours.detach(), g.clone(), *states)
        after()
        assert torch.equal(ours, theirs), f"step {step}"
    for key, state in optimizer.state[theirs].items():
        if isinstance(state, torch.Tensor):
            assert torch.equal(mine.state[ours][key], state), key


def test_a_number_that_is_not_refreshed_stays_what_it_was() -> None:
    p = parameter(torch.float32)
    optimizer = SGD([p], 0.5)
    graph, call = graph_of(optimizer, p)
    scalars = Scalars.of(graph, CPU)
    assert scalars is not None
    update, g, before = scalars.bound(call).op, torch.ones(4099), p.detach().clone()
    scalars.refresh()
    optimizer.param_groups[0]["lr"] = 100.0
    update(p.detach(), g)
    assert torch.equal(p, before - 0.5)


@pytest.mark.parametrize(
    ("name", "value"),
    [("betas", (0.8, 0.999)), ("eps", 1e-3), ("weight_decay", 0.5), ("maximize", True)],
)
def test_a_number_that_is_baked_in_is_told_when_it_changes(name: str, value: object) -> None:
    p = parameter(torch.float32)
    optimizer = AdamW([p], 0.01)
    scalars = Scalars.of(graph_of(optimizer, p)[0], CPU)
    assert scalars is not None
    before = scalars.baked()
    optimizer.param_groups[0]["lr"] = 0.5
    assert scalars.baked() == before
    optimizer.param_groups[0][name] = value
    assert scalars.baked() != before


def test_updates_on_the_host_read_the_optimizer_itself() -> None:
    p = parameter(torch.float32)
    graph, call = graph_of(SGD([p], 0.5), p)
    assert Scalars.of(graph, CPU) is not None
    builder = GraphBuilder()
    buffers = [builder.buffer("p", p.nbytes), builder.buffer("g", p.nbytes)]
    builder.task("update", buffers, buffers, kernel=call, lane="host")
    on_host = builder.graph()
    assert Scalars.of(on_host, CPU) is None
