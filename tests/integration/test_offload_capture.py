"""What a captured graph looks like: tasks, buffers, and the user's tensors bound to them."""

from typing import Any

import torch
from support.offload_reference import Reference as reference
from torch import nn
from torch.nn import functional

from offload.graph.taskgraph import Role, Task, TaskGraph
from offload.program.kernels import Value
from offload.tracing.capture import traced as capture
from offload.tracing.capture import traced_training_step as capture_training_step


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


def test_frozen_parameters_are_read_and_never_updated() -> None:
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


def test_another_shape_gives_another_graph_of_the_same_step() -> None:
    _, _, graph = net_graph()
    other = graph.program.recapture(torch.randn(5, 3, 8, 8), torch.tensor([0, 1, 0, 1, 0]))
    assert names(other) == names(graph)
    assert other.program.inputs[0].size == (5, 3, 8, 8)
    assert other.program.tensors.keys() == graph.program.tensors.keys()


def test_inference_without_gradients() -> None:
    net = Net().eval()

    @torch.inference_mode()
    def step(x: torch.Tensor) -> torch.Tensor:
        return net(x)

    x = torch.randn(2, 3, 6, 6)
    graph = capture(step, x)
    assert {t.phase for t in graph.tasks} == {"forward"}
    assert torch.equal(reference(graph)(x)[0], step(x))
    assert "conv.weight" in graph.program.tensors


def test_data_of_a_parameter_is_the_parameter() -> None:
    weight = nn.Parameter(torch.ones(3))

    def step(x: torch.Tensor) -> torch.Tensor:
        weight.data.add_(x)
        return weight.data[1:] * 2

    graph = capture(step, torch.ones(3))
    assert role(graph, "weight") is Role.PARAMETER
    assert reference(graph)(torch.ones(3))[0].tolist() == [4.0, 4.0]
    assert weight.tolist() == [2.0, 2.0, 2.0]


def test_values_in_kernels_are_over_buffers_of_the_graph() -> None:
    _, _, graph = net_graph()
    for found in graph.tasks:
        for call in found.kernel.calls:
            values = [v for v in (*call.args, *call.outputs) if isinstance(v, Value)]
            assert {v.buffer for v in values} <= {*found.touches}, found.name
