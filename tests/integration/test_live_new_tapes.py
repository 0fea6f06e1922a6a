"""What a live session finds out about a new tape, and what it knows already."""

from typing import Any

import pytest
import torch
from support.live_loops import Loop
from torch import nn

from offload.graph.costs import Costs
from offload.live import runner_plans
from offload.live.session import LiveSession
from offload.memory import cpu_shim as shim

pytestmark = pytest.mark.usefixtures("core")

PLACED = pytest.mark.skipif(shim.available() is None, reason=shim.why_not() or "there is one")


@PLACED
@pytest.mark.parametrize("budget", ["70%", "100%"])
def test_all_kernels_write_where_they_should_and_updates_too(budget: str) -> None:
    loop = Loop("cpu")
    session = LiveSession(loop.net, loop.optimizer, budget=budget, costs=Costs())
    with session:
        for x, y in loop.batches:
            with session.step():
                loop.step(x, y)
        plan = session.plan
    assert plan is not None and session.planned_steps == len(loop.batches)
    calls = [call for task in plan.graph.tasks for call in task.kernel.calls]
    assert calls and all(call.allocations is not None for call in calls)
    assert not [note for note in plan.graph.notes if "did not run" in note]


def test_with_the_whole_budget_a_longer_batch_leaves_the_plans_that_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []

    def plan(*asked: Any) -> Any:
        made.append(asked)
        return real(*asked)

    real = runner_plans.plan
    monkeypatch.setattr(runner_plans, "plan", plan)
    net = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with LiveSession(net, optimizer, budget="100%") as session:
        for length in (4, 8, 16, 4, 8, 16):
            with session.step():
                net(torch.ones(length, 8)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert session.planned_steps == 6 and len(made) == 1


class Alike(nn.Module):
    """Operations that are nearly the same: over one tensor or two, of another type or layout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        both = x + x.clone()
        own = x + x
        for other in (x.t(), x.double(), x[:3], x[1:4]):
            both = both + (other.exp() + other).sum().float()
        grown = x.clone().mul_(x).mul_(2).add_(own)
        return (both * own + grown).sum()


@pytest.mark.parametrize("budget", ["70%", "100%"])
def test_operations_that_are_nearly_alike_are_not_taken_for_one_another(budget: str) -> None:
    def losses(live: bool) -> list[float]:
        torch.manual_seed(0)
        net, found = Alike(), []
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
        session = LiveSession(net, optimizer, budget=budget if live else None)
        with session:
            for _ in range(4):
                x = torch.randn(6, 6)
                with session.step() if live else session.suspended():
                    loss = net(x)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                found.append(loss.detach())
        assert not live or session.planned_steps == 4
        return [float(loss) for loss in found]

    assert losses(True) == losses(False)
