"""What a captured graph looks like: tasks, buffers, and the user's tensors bound to them."""

import importlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from offload.graph.taskgraph import Role, Task, TaskGraph
from offload.program.kernels import Value
from offload.tracing.capture import traced as capture
from offload.tracing.capture import traced_training_step as capture_training_step

MODULE_SCALE = torch.full((3,), 2.0)


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("offload_reference").Reference


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


def net_graph(**settings: Any) -> tuple[Net, Any, TaskGraph]:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), **settings)
    batch = torch.randn(2, 3, 6, 6), torch.tensor([0, 1])
    return net, optimizer, capture_training_step(net, functional.cross_entropy, optimizer, *batch)


def test_tasks_are_named_by_module_and_say_where_they_come_from() -> None:
    _, _, graph = net_graph()
    found = names(graph)
    assert len(set(found)) == len(found)
    assert {"conv.convolution", "conv.convolution.backward", "head.1.addmm"} <= {*found}
    assert "conv.weight.update" in found
    forward = task(graph, "conv.convolution").where
    assert forward.startswith("test_offload_capture.py:")
    assert forward.endswith(" in forward")
    assert task(graph, "conv.convolution.backward").where == forward


def test_phases_follow_each_other() -> None:
    _, _, graph = net_graph()
    phases = [t.phase for t in graph.tasks]
    assert phases == sorted(phases, key=["forward", "backward", "update"].index)
    assert {*phases} == {"forward", "backward", "update"}


def test_buffers_have_the_roles_that_they_play() -> None:
    _, _, graph = net_graph()
    assert role(graph, "input.0") is Role.INPUT
    assert role(graph, "conv.weight") is Role.PARAMETER
    assert role(graph, "norm.running_mean") is Role.BUFFER
    assert role(graph, "optimizer.exp_avg.conv.weight") is Role.STATE
    assert role(graph, "conv.convolution") is Role.ACTIVATION
    update = task(graph, "conv.weight.update")
    [gradient] = [b for b in update.reads if b not in update.writes]
    assert graph.buffers[gradient].role is Role.GRADIENT
    # Gradients that run through the network are none of a parameter.
    assert sum(b.role is Role.GRADIENT for b in graph.buffers) == 6


def test_statistics_are_written_though_the_schema_does_not_say_so() -> None:
    _, _, graph = net_graph()
    norm = task(graph, "norm.native_batch_norm")
    assert {"norm.running_mean", "norm.running_var"} <= called(graph, norm.writes)
    assert not norm.repeatable


def test_views_and_allocations_are_no_tasks() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(3, 4)
        y.copy_(x.t())
        return y.view(2, 6)[0]

    graph = capture(step, torch.randn(4, 3))
    assert names(graph) == ["copy_"]
    [copy] = graph.tasks
    assert called(graph, copy.reads) == {"input.0"}
    assert called(graph, copy.writes) == {"copy_"}
    [out] = graph.program.outputs
    assert (out.size, out.stride, out.offset) == ((6,), (1,), 0)
    assert graph.outputs == (out.buffer,)


def test_only_what_overwrites_everything_reads_nothing() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        y[0].zero_()  # a part
        z = x * 2
        z.fill_(3.0)  # the whole
        return y + z

    graph = capture(step, torch.randn(4, 3))
    part, whole = task(graph, "zero_"), task(graph, "fill_")
    assert part.reads == part.writes
    assert whole.reads == ()
    assert not part.repeatable
    assert not whole.repeatable


def test_a_copy_onto_itself_keeps_what_is_there(reference: Any) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        y.copy_(y)
        torch.mul(y, 2, out=y)
        return y

    graph = capture(step, torch.ones(3))
    assert all(t.reads for t in graph.tasks)
    assert reference(graph)(torch.ones(3))[0].tolist() == [4.0, 4.0, 4.0]


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


def test_attention_without_dropout_draws_nothing() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(x, x, x)

    graph = capture(step, torch.randn(1, 2, 4, 8))
    assert all(t.repeatable and not t.after for t in graph.tasks)


def test_work_is_counted() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return (x @ x).relu()

    graph = capture(step, torch.randn(16, 16))
    product, relu = graph.tasks
    assert product.flops == 2 * 16**3
    assert product.traffic == 3 * 16 * 16 * 4
    assert not product.pointwise
    assert relu.pointwise
    assert relu.repeatable


def test_the_users_tensors_are_bound_by_name() -> None:
    net, optimizer, graph = net_graph()
    tensors = graph.program.tensors
    assert tensors["conv.weight"] is net.conv.weight
    assert tensors["norm.running_var"] is net.norm.running_var
    exp_avg = optimizer.state[net.conv.weight]["exp_avg"]
    assert tensors["optimizer.exp_avg.conv.weight"]() is exp_avg
    assert {b.tensor for b in graph.buffers if b.persistent} == tensors.keys()
    assert not any(name.startswith("spare") for name in tensors)
    assert net.spare.weight not in optimizer.state


def test_frozen_parameters_are_read_and_never_updated(reference: Any) -> None:
    net = Net()
    net.conv.requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    batch = torch.randn(2, 3, 6, 6), torch.tensor([0, 1])
    graph = capture_training_step(net, functional.cross_entropy, optimizer, *batch)
    assert role(graph, "conv.weight") is Role.PARAMETER
    assert "conv.weight.update" not in names(graph)
    before = net.conv.weight.clone()
    reference(graph)(*batch)
    assert torch.equal(before, net.conv.weight)


def test_parameters_of_no_optimizer_stay_as_they_are() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.head.parameters(), 0.1)
    batch = torch.randn(2, 3, 6, 6), torch.tensor([0, 1])
    graph = capture_training_step(net, functional.cross_entropy, optimizer, *batch)
    assert [n for n in names(graph) if "update" in n] == [
        "head.1.weight.update",
        "head.1.bias.update",
    ]
    assert all(p.grad is None for p in net.parameters())


def test_a_gradient_shared_or_expanded_is_laid_out_as_eager_does(reference: Any) -> None:
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


def test_a_gradient_that_is_a_parameter_is_read_before_that_one_changes(reference: Any) -> None:
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


def test_a_loss_may_use_the_parameters_themselves(reference: Any) -> None:
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


def test_another_shape_gives_another_graph_of_the_same_step() -> None:
    _, _, graph = net_graph()
    other = graph.program.recapture(torch.randn(5, 3, 8, 8), torch.tensor([0, 1, 0, 1, 0]))
    assert names(other) == names(graph)
    assert other.program.inputs[0].size == (5, 3, 8, 8)
    assert other.program.tensors.keys() == graph.program.tensors.keys()


# capture(step): whatever the step closes over


def test_a_step_reaches_its_surroundings_and_changes_them(reference: Any) -> None:
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


def test_a_returned_parameter_has_the_value_that_the_step_leaves(reference: Any) -> None:
    weight = nn.Parameter(torch.ones(3))

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen = weight.detach()
        with torch.no_grad():
            weight.add_(x)
        return seen, seen * 1

    graph = capture(step, torch.ones(3))
    alias, copy = reference(graph)(torch.ones(3))
    assert alias.tolist() == copy.tolist() == weight.tolist() == [2.0, 2.0, 2.0]


def test_an_input_may_be_returned_and_changed(reference: Any) -> None:
    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.add_(1)
        return x, x.t()

    out, turned = reference(capture(step, torch.zeros(2, 3)))(torch.zeros(2, 3))
    assert out.tolist() == [[1.0] * 3] * 2
    assert turned.size() == (3, 2)


def test_a_tensor_written_down_in_the_step_is_made_anew_every_step(reference: Any) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        sums = torch.tensor([1.0, 2.0])
        sums += x
        return sums * torch.tensor(3.0)

    run = reference(capture(step, torch.ones(2)))
    for _ in range(2):
        assert run(torch.ones(2))[0].tolist() == [6.0, 9.0]


def test_gradients_inside_of_a_step_and_of_gradients(reference: Any) -> None:
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


def test_inference_without_gradients(reference: Any) -> None:
    net = Net().eval()

    @torch.inference_mode()
    def step(x: torch.Tensor) -> torch.Tensor:
        return net(x)

    x = torch.randn(2, 3, 6, 6)
    graph = capture(step, x)
    assert {t.phase for t in graph.tasks} == {"forward"}
    assert torch.equal(reference(graph)(x)[0], step(x))
    assert "conv.weight" in graph.program.tensors


def test_the_same_tensor_given_twice_is_two_inputs(reference: Any) -> None:
    def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + 2 * b

    x = torch.ones(2)
    graph = capture(step, x, x)
    assert reference(graph)(torch.ones(2), torch.zeros(2))[0].tolist() == [1.0, 1.0]


def test_one_storage_is_one_buffer_whoever_looks_at_it(reference: Any) -> None:
    table = torch.arange(6.0)
    head, tail = table[:4], table[2:]

    def step(x: torch.Tensor) -> torch.Tensor:
        head.add_(x)
        return tail * 1

    graph = capture(step, torch.ones(()))
    assert Counter(b.persistent for b in graph.buffers)[True] == 1
    assert reference(graph)(torch.ones(()))[0].tolist() == [3.0, 4.0, 4.0, 5.0]
    assert table.tolist() == [1.0, 2.0, 3.0, 4.0, 4.0, 5.0]


def test_data_of_a_parameter_is_the_parameter(reference: Any) -> None:
    weight = nn.Parameter(torch.ones(3))

    def step(x: torch.Tensor) -> torch.Tensor:
        weight.data.add_(x)
        return weight.data[1:] * 2

    graph = capture(step, torch.ones(3))
    assert role(graph, "weight") is Role.PARAMETER
    assert reference(graph)(torch.ones(3))[0].tolist() == [4.0, 4.0]
    assert weight.tolist() == [2.0, 2.0, 2.0]


def test_function_transforms_are_captured(reference: Any) -> None:
    weight = torch.randn(3, 3)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (x @ weight).tanh().sum()

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(torch.func.grad(loss))(x)

    x = torch.randn(4, 3)
    assert torch.equal(reference(capture(step, x))(x)[0], step(x))


def test_values_in_kernels_are_over_buffers_of_the_graph() -> None:
    _, _, graph = net_graph()
    for found in graph.tasks:
        for call in found.kernel.calls:
            values = [v for v in (*call.args, *call.outputs) if isinstance(v, Value)]
            assert {v.buffer for v in values} <= {*found.touches}, found.name
