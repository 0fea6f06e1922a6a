"""Training steps in parts: micro-batches, clipping, several steps over the same tensors."""

import copy
from typing import Any

import pytest
import torch
from products import every_pair
from torch import nn
from torch.nn import functional

import offload
from offload import Runner, StepError, capture_training_step
from offload.graph.taskgraph import HOST
from offload.planning.refusal import smallest_budget
from offload.tracing.capture import capture_step
from offload.tracing.training import Clip, TrainingStep


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))


class Shared(nn.Module):
    """Two parameters with one gradient, one that is unused, one that is summed by expansion."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(16))
        self.c, self.unused = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.a + self.b).tanh() + self.c.sum()


def batches(count: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(4, 16) for _ in range(count)]


def clip_eagerly(module: nn.Module, clip: Clip | None) -> None:
    if clip and clip.by == "norm":
        nn.utils.clip_grad_norm_(module.parameters(), clip.limit)
    elif clip:
        nn.utils.clip_grad_value_(module.parameters(), clip.limit)


@pytest.mark.parametrize(
    "make, clip, share",
    every_pair([net, Shared], [None, Clip(0.5), Clip(1e9), Clip(0.01, "value")], [2.0, 0.6]),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_window_of_three_micro_batches_is_eagers(make: Any, clip: Clip, share: float) -> None:
    ours, theirs = make(), make()
    mine = torch.optim.SGD(ours.parameters(), 0.1, momentum=0.9)
    other = torch.optim.SGD(theirs.parameters(), 0.1, momentum=0.9)
    data = batches(6)

    def forward(x: torch.Tensor) -> Any:
        loss = ours(x).square().mean() / 3
        return loss, (loss.detach() * 3,)

    sums: dict[Any, torch.Tensor] = {}
    first = TrainingStep(forward, mine, {"": ours}, False, sums)
    graph = capture_step(first, data[0])
    held = frozenset(sums)
    assert ("unused" in dict(ours.named_parameters())) == (len(held) < len([*ours.parameters()]))
    middle = capture_step(TrainingStep(forward, mine, {"": ours}, False, sums, held), data[0])
    last = capture_step(TrainingStep(forward, mine, {"": ours}, True, sums, held, clip), data[0])
    peak = offload.plan(last).peak_bytes
    try:
        plan = offload.plan(last, int(peak * share))
    except offload.BudgetTooSmall as refused:
        plan = offload.plan(last, refused.needed)
    with Runner(plan, key="last", poison=True) as runner:
        runner.add("first", graph)
        runner.add("middle", middle)
        for at in (0, 3):
            found = [
                runner.run(name, x)
                for name, x in zip(("first", "middle", "last"), data[at : at + 3], strict=True)
            ]
            other.zero_grad()
            for x, (loss, whole) in zip(data[at : at + 3], found, strict=True):
                expected = theirs(x).square().mean() / 3
                expected.backward()
                assert torch.equal(loss, expected.detach())
                assert torch.equal(whole, expected.detach() * 3)
            clip_eagerly(theirs, clip)
            other.step()
            for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert torch.equal(p, q)


def test_a_step_that_was_forgotten_must_be_added_again() -> None:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    [x] = batches(1)

    def forward(x: torch.Tensor) -> Any:
        return module(x).square().mean(), ()

    step = TrainingStep(forward, optimizer, {"": module})
    graph = capture_step(step, x)
    with Runner(offload.plan(graph), key="a") as runner:
        runner.add("b", capture_step(step, x[:2]))
        before = copy.deepcopy(module)
        runner.run("b", x[:2])
        assert not torch.equal(before[0].weight, module[0].weight)
        runner.forget("b")
        with pytest.raises(StepError, match="no step 'b'"):
            runner.run("b", x[:2])
        with pytest.raises(StepError, match="shape"):
            runner.run("a", x[:2])
        runner.run("a", x)


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
    layers = [part for _ in range(4) for part in (nn.Linear(32, 32), nn.ReLU())]
    nets = [nn.Sequential(*copy.deepcopy(layers), nn.Linear(32, 8)) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers = [torch.optim.SGD(net.parameters(), 0.1, momentum=0.9) for net in nets]
    small, large = (torch.randn(n, 32) for n in (4, 512))
    graphs = [
        capture_training_step(
            nets[0], functional.mse_loss, optimizers[0], x, torch.zeros(len(x), 8)
        )
        for x in (small, large)
    ]
    budget = max(smallest_budget(graph, 0)[0] for graph in graphs)
    planned = offload.plan(graphs[0], budget)
    stays = [b for b, p in planned.memgraph.starts.items() if p.arena != HOST]
    assert any(planned.graph.buffers[b].persistent for b in stays), "nothing is in the way"
    with Runner(planned) as runner:
        for x in (small, large, large, small, large, small):
            zeros = torch.zeros(len(x), 8)
            [loss] = runner(x, zeros)
            expected = functional.mse_loss(nets[1](x), zeros)
            optimizers[1].zero_grad()
            expected.backward()
            optimizers[1].step()
            assert torch.equal(loss, expected.detach())
    for ours, theirs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)
        states = [
            o.state[p]["momentum_buffer"] for o, p in zip(optimizers, (ours, theirs), strict=True)
        ]
        assert torch.equal(*states)
