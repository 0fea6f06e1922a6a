"""What a captured graph looks like, that it has eager's bits, and what a capture refuses."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.offload_reference import Reference as reference
from torch import nn
from torch.nn import functional

import offload
from offload import Runner
from offload.graph.taskgraph import Role, Task, TaskGraph
from offload.live.function_capture import capture_kernels as capture

MODULE_SCALE = torch.full((3,), 2.0)


def names(graph: TaskGraph) -> list[str]:
    return [t.name for t in graph.tasks]


def task(graph: TaskGraph, name: str) -> Task:
    [found] = [t for t in graph.tasks if t.name == name]
    return found


def called(graph: TaskGraph, buffers: tuple[int, ...]) -> set[str]:
    return {graph.buffers[b].name for b in buffers}


def role(graph: TaskGraph, name: str) -> Role:
    [found] = [b for b in graph.buffers if b.name == name]
    return found.role


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2))
        self.spare = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.norm(self.conv(x)), inplace=True)
        return self.head(x.mean((2, 3)))


def test_draws_of_random_numbers_are_chained_and_not_repeatable() -> None:
    class Three(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.dropout(functional.dropout(functional.dropout(x)))

    graph = capture(Three().forward, torch.randn(8))
    draws = [n for n, t in enumerate(graph.tasks) if "bernoulli_" in t.name]
    assert len(draws) == 3
    assert [graph.tasks[n].after for n in draws] == [(), (draws[0],), (draws[1],)]
    assert not any(graph.tasks[n].repeatable for n in draws)
    assert all(not t.after for n, t in enumerate(graph.tasks) if n not in draws)


def batch(rows: int, size: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 3, size, size), torch.randint(0, 2, (rows,))


def backward_of(net: nn.Module) -> Callable[..., tuple[Any, ...]]:
    """A step that returns a loss and the gradients of it."""
    weights = [p for name, p in net.named_parameters() if not name.startswith("spare")]

    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
        loss = functional.cross_entropy(net(x), y)
        return loss.detach(), torch.autograd.grad(loss, weights)

    return step


def test_a_step_that_goes_backward_has_phases_roles_and_lines() -> None:
    net = Net()
    graph = capture(backward_of(net), *batch(2))
    phases = [t.phase for t in graph.tasks]
    assert phases == sorted(phases, key=["forward", "backward"].index)
    assert {*phases} == {"forward", "backward"}
    assert role(graph, "input.0") is Role.INPUT
    assert role(graph, "conv.weight") is Role.PARAMETER
    assert role(graph, "norm.running_mean") is Role.BUFFER
    assert graph.program.tensors["conv.weight"] is net.conv.weight
    assert {b.tensor for b in graph.buffers if b.persistent} == graph.program.tensors.keys()
    assert not any(name.startswith("spare") for name in graph.program.tensors)
    norm = task(graph, "native_batch_norm.default")
    assert {"norm.running_mean", "norm.running_var"} <= called(graph, norm.writes)
    assert task(graph, "convolution.default").where.endswith(" in forward")


@pytest.mark.parametrize("share", [None, 0.0, 0.5])
@pytest.mark.parametrize("engine", ["serial", "threads"])
def test_a_runner_has_eagers_bits_and_batches_of_other_shapes(
    engine: str, share: float | None
) -> None:
    torch.manual_seed(0)
    net, twin = Net(), Net()
    twin.load_state_dict(net.state_dict())
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    graph = offload.capture(backward_of(net), *batch(4))
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    with pytest.raises(offload.BudgetTooSmall) as refused:
        offload.plan(graph, 1)
    least, whole = refused.value.needed, offload.plan(graph).peak_bytes
    budget = None if share is None else least + int(share * max(whole - least, 0))
    eager = backward_of(twin)
    with Runner(offload.plan(graph, budget), engine, "random", poison=True) as runner:
        for seed, rows in enumerate((4, 2, 4, 3)):
            given = batch(rows)
            torch.manual_seed(seed)
            loss, *gradients = runner(*given)
            torch.manual_seed(seed)
            expected, wanted = eager(*given)
            assert torch.equal(loss, expected)
            assert all(map(torch.equal, gradients, wanted))
            state = twin.state_dict()
            assert all(torch.equal(state[name], t) for name, t in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.gpu
def test_a_module_on_the_host_is_captured_for_a_gpu_and_stays_there() -> None:
    layer = nn.Linear(8, 3)
    twin = nn.Linear(8, 3).cuda()
    twin.load_state_dict(layer.state_dict())

    def step(x: torch.Tensor, of: nn.Module = layer) -> tuple[torch.Tensor, ...]:
        loss = (of(x) * torch.tensor([1.0, 2.0, 3.0], device=x.device)).square().mean()
        return loss.detach(), *torch.autograd.grad(loss, list(of.parameters()))

    graph = offload.capture(lambda x: step(x, layer), torch.ones(4, 8), device="cuda")
    assert {p.device.type for p in layer.parameters()} == {"cpu"}
    with Runner(offload.plan(graph), poison=True) as runner:
        for rows in (4, 2, 4):
            x = torch.randn(rows, 8)
            for ours, theirs in zip(runner(x), step(x.cuda(), twin), strict=True):
                assert torch.equal(ours.cuda(), theirs)


def test_gradients_of_the_users_are_added_to() -> None:
    layer, x = nn.Linear(3, 2), torch.ones(2, 3)
    for p in layer.parameters():
        p.grad = torch.ones_like(p)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = layer(x).sum()
        loss.backward()
        return loss.detach()

    graph = capture(step, x)
    assert role(graph, "weight.grad") is Role.BUFFER
    reference(graph)(x)
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[3.0] * 3] * 2


def test_data_of_a_parameter_is_the_parameter() -> None:
    weight = nn.Parameter(torch.ones(3))

    def step(x: torch.Tensor) -> torch.Tensor:
        weight.data.add_(x)
        return weight.data[1:] * 2

    graph = capture(step, torch.ones(3))
    assert role(graph, "weight") is Role.PARAMETER
    assert reference(graph)(torch.ones(3))[0].tolist() == [4.0, 4.0]
    assert weight.tolist() == [2.0, 2.0, 2.0]


def test_a_step_reaches_its_surroundings_and_changes_them() -> None:
    weight = nn.Parameter(torch.randn(3, 3))
    total = torch.zeros(3)
    scale = torch.full((3,), 0.5)

    def step(x: torch.Tensor) -> dict[str, Any]:
        y = (x @ weight) * scale * MODULE_SCALE
        with torch.no_grad():
            total.add_(y.sum(0))
            weight.mul_(0.9)
        return {"y": y.detach(), "parts": [y.detach()[0], 7], "total": total}

    graph = capture(step, torch.randn(2, 3))
    roles = {b.name: b.role for b in graph.buffers if b.persistent}
    assert roles == {
        "weight": Role.PARAMETER,
        "total": Role.BUFFER,
        "scale": Role.CONSTANT,
        "MODULE_SCALE": Role.CONSTANT,
    }
    assert not total.any()
    x, before = torch.randn(2, 3), weight.detach().clone()
    [out] = reference(graph)(x)
    expected = (x @ before) * scale * MODULE_SCALE
    assert torch.equal(out["y"], expected)
    assert torch.equal(out["parts"][0], expected[0])
    assert out["parts"][1] == 7
    assert torch.equal(total, expected.sum(0))
    assert torch.equal(out["total"], total)
    assert torch.equal(weight, before * 0.9)


def test_what_a_step_writes_requires_no_gradients_after_a_capture() -> None:
    net, seen = nn.Linear(4, 4), torch.zeros(4)
    buffer, made = torch.zeros(2, 4), torch.ones(4, requires_grad=True) * 2
    row, maker, later = buffer[1], made.grad_fn, made.square()

    def step(x: torch.Tensor) -> torch.Tensor:
        for target in (seen, row, made):
            target.add_(net(x).sum(0))
        return buffer * 2

    offload.capture(step, torch.ones(2, 4))
    assert not any(each.requires_grad for each in (seen, row, buffer))
    assert made.grad_fn is maker
    later.sum().backward()  # which needs the version of before


def test_a_returned_parameter_has_the_value_that_the_step_leaves() -> None:
    weight = nn.Parameter(torch.ones(3))

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen = weight.detach()
        with torch.no_grad():
            weight.add_(x)
        return seen, seen * 1

    graph = capture(step, torch.ones(3))
    alias, copy = reference(graph)(torch.ones(3))
    assert alias.tolist() == copy.tolist() == weight.tolist() == [2.0, 2.0, 2.0]


def test_a_tensor_written_down_in_the_step_is_made_anew_every_step() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        sums = torch.tensor([1.0, 2.0])
        sums += x
        return sums * torch.tensor(3.0)

    run = reference(capture(step, torch.ones(2)))
    for _ in range(2):
        assert run(torch.ones(2))[0].tolist() == [6.0, 9.0]


def test_one_storage_is_one_buffer_whoever_looks_at_it() -> None:
    table = torch.arange(6.0)
    head, tail = table[:4], table[2:]

    def step(x: torch.Tensor) -> torch.Tensor:
        head.add_(x)
        return tail * 1

    graph = capture(step, torch.ones(()))
    assert Counter(b.persistent for b in graph.buffers)[True] == 1
    assert reference(graph)(torch.ones(()))[0].tolist() == [3.0, 4.0, 4.0, 5.0]
    assert table.tolist() == [1.0, 2.0, 3.0, 4.0, 4.0, 5.0]


def test_function_transforms_are_captured() -> None:
    weight = torch.randn(3, 3)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (x @ weight).tanh().sum()

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(torch.func.grad(loss))(x)

    x = torch.randn(4, 3)
    assert torch.equal(reference(capture(step, x))(x)[0], step(x))
