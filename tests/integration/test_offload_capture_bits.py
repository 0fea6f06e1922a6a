"""Unusual steps have eager's bits once captured: shared gradients, closures, aliases."""

from collections import Counter
from typing import Any

import pytest
import torch
from support.offload_reference import Reference as reference
from torch import nn
from torch.nn import functional

from offload.errors import CaptureError
from offload.graph.taskgraph import Role
from offload.tracing.capture import traced as capture
from offload.tracing.capture import traced_training_step as capture_training_step

MODULE_SCALE = torch.full((3,), 2.0)


def test_a_copy_onto_itself_keeps_what_is_there() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        y.copy_(y)
        torch.mul(y, 2, out=y)
        return y

    graph = capture(step, torch.ones(3))
    assert all(t.reads for t in graph.tasks)
    assert reference(graph)(torch.ones(3))[0].tolist() == [4.0, 4.0, 4.0]


def test_another_shape_in_place_is_a_view_and_no_task() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        y.t_()
        y.unsqueeze_(0)
        y.transpose_(0, 2)
        y.squeeze_()
        return y * torch.arange(6.0).view(2, 3)

    x = torch.arange(6.0).view(2, 3)
    graph = capture(step, x)
    assert torch.equal(reference(graph)(x)[0], step(x))
    assert not [task.name for task in graph.tasks if task.name.endswith("_")]


@pytest.mark.parametrize("of_the_module", [True, False])
def test_another_shape_of_what_outlives_the_step_is_refused(of_the_module: bool) -> None:
    """Every step would turn a square of the module's the other way round."""
    square = torch.arange(9.0).view(3, 3)

    def step(x: torch.Tensor) -> torch.Tensor:
        (square if of_the_module else x).t_()
        return x @ square

    with pytest.raises(CaptureError, match="t_ gives a tensor of the module or of the batch"):
        capture(step, torch.ones(3, 3))


def test_a_gradient_shared_or_expanded_is_laid_out_as_eager_does() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(3, 4))
            self.b = nn.Parameter(torch.randn(3, 4))
            self.c = nn.Parameter(torch.randn(4, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.a + self.b + self.c.t()) * x

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (out - y).sum()

    ours, theirs = Sum(), Sum()
    theirs.load_state_dict(ours.state_dict())
    made = [torch.optim.Adam(m.parameters(), 0.1, fused=True) for m in (ours, theirs)]
    batch = torch.randn(()), torch.randn(())
    graph = capture_training_step(ours, loss, made[0], *batch)
    run = reference(graph)
    for _ in range(3):
        run(*batch)
        made[1].zero_grad()
        loss(theirs(batch[0]), batch[1]).backward()
        made[1].step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q)


class Swap(torch.autograd.Function):
    """A gradient that is another parameter itself."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return (a + b).sum()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = ctx.saved_tensors
        return b.detach(), a.detach()


def test_a_gradient_that_is_a_parameter_is_read_before_that_one_changes() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.tensor([1.0, 2.0]))
            self.b = nn.Parameter(torch.tensor([10.0, 20.0]))

        def forward(self) -> torch.Tensor:
            return Swap.apply(self.a, self.b)  # type: ignore[return-value]

    pair = Pair()
    optimizer = torch.optim.SGD(pair.parameters(), 1.0)
    batch = (torch.zeros(()),)
    graph = capture_training_step(pair, lambda out, y: out + y, optimizer, *batch)
    reference(graph)(*batch)
    assert pair.a.tolist() == [-9.0, -18.0]
    assert pair.b.tolist() == [9.0, 18.0]


def test_a_loss_may_use_the_parameters_themselves() -> None:
    """Closed over, not passed: a weight decay written by hand."""
    nets = [nn.Linear(3, 2), nn.Linear(3, 2)]
    nets[1].load_state_dict(nets[0].state_dict())

    def loss_of(net: nn.Module) -> Any:
        def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            decay = sum(p.square().sum() for p in net.parameters())
            return functional.cross_entropy(out, y) + 0.1 * decay

        return loss

    made = [torch.optim.SGD(net.parameters(), 0.1) for net in nets]
    batch = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    reference(capture_training_step(nets[0], loss_of(nets[0]), made[0], *batch))(*batch)
    loss_of(nets[1])(nets[1](batch[0]), batch[1]).backward()
    made[1].step()
    assert torch.equal(nets[0].weight, nets[1].weight)


# capture(step): whatever the step closes over


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


def test_an_input_may_be_returned_and_changed() -> None:
    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.add_(1)
        return x, x.t()

    out, turned = reference(capture(step, torch.zeros(2, 3)))(torch.zeros(2, 3))
    assert out.tolist() == [[1.0] * 3] * 2
    assert turned.size() == (3, 2)


def test_a_tensor_written_down_in_the_step_is_made_anew_every_step() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        sums = torch.tensor([1.0, 2.0])
        sums += x
        return sums * torch.tensor(3.0)

    run = reference(capture(step, torch.ones(2)))
    for _ in range(2):
        assert run(torch.ones(2))[0].tolist() == [6.0, 9.0]


def test_gradients_inside_of_a_step_and_of_gradients() -> None:
    weight = nn.Parameter(torch.randn(3, 3))

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x.requires_grad_()
        [slope] = torch.autograd.grad((x @ weight).tanh().sum(), x, create_graph=True)
        penalty = slope.square().sum()
        return penalty.detach(), *torch.autograd.grad(penalty, weight)

    x = torch.randn(2, 3)
    graph = capture(step, x.clone())
    found = reference(graph)(x.clone())
    for mine, theirs in zip(found, step(x.clone()), strict=True):
        assert torch.equal(mine, theirs)
    assert weight.grad is None


def test_the_same_tensor_given_twice_is_two_inputs() -> None:
    def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + 2 * b

    x = torch.ones(2)
    graph = capture(step, x, x)
    assert reference(graph)(torch.ones(2), torch.zeros(2))[0].tolist() == [1.0, 1.0]


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
