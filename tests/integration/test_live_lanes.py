"""Lanes of one live step have the bits of lanes one after the other, whatever order a plan has.

each lane draws by its own seed    cuts and draws of the host within a lane    errors in a lane
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.live.lanes import begin_lane
from offload.live.session import LiveSession

pytestmark = pytest.mark.filterwarnings("ignore")

WIDTH, LANES, STEPS = 160, 3, 4
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Step = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def whole(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (net(x) * torch.rand((), device=x.device)).square().mean()


def with_a_cut(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The second half of a lane, and the next ones, are a part of their own."""
    hidden = net[:4](x)
    scale = 2.0 if hidden.sum().item() > 0 else 0.5
    return (net[4:](hidden) * torch.rand((), device=x.device) * scale).square().mean()


def with_a_draw_at_once(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return whole(net, x * torch.rand(()).item())


def with_a_state(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """It draws the same twice."""
    state = torch.get_rng_state()
    first = torch.rand(3)
    torch.set_rng_state(state)
    assert torch.equal(first, torch.rand(3))
    return whole(net, x)


def with_a_last_draw(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Whatever draws after the step goes on with the last lane's state."""
    loss = whole(net, x)
    return loss + 0 * torch.rand((), device=x.device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("step", [whole, with_a_cut, with_a_draw_at_once, with_a_state,
                                  with_a_last_draw])  # fmt: skip
def test_lanes_have_the_bits_of_lanes_one_after_the_other(step: Step, device: str) -> None:
    assert_same(trained(step, "50%", device), trained(step, None, device))


def trained(step: Step, budget: str | None, device: str) -> list[Any]:
    """Losses, what is drawn after each step, and sums."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(16, WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
        nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 4),
    ).to(device)  # fmt: skip
    batches = torch.randn(STEPS, LANES, 8, 16).to(device)
    sums = {p: torch.zeros_like(p) for p in net.parameters()}
    slow = offload.Costs(h2d=2e8, d2h=2e8)
    live = None if budget is None else LiveSession(net, budget=budget, costs=slow, device=device)
    found: list[Any] = []
    with live or nullcontext():
        for number, of_step in enumerate(batches):
            for p, total in sums.items():
                p.grad = total
            with nullcontext() if live is None else live.step(keeps=[*sums]):
                losses: list[torch.Tensor] = []
                for lane, x in enumerate(of_step):
                    begin_lane(100 * number + lane)
                    loss = step(net, x)
                    loss.backward()
                    losses.append(loss.detach())
            found += [*map(float, losses), float(torch.rand((), device=device))]
            for p in net.parameters():
                p.grad = None
        if live is not None:
            assert live.planned_steps == STEPS
            assert live.plan is not None
            if step is whole:
                told = live.plan.explain()
                assert f"a weight moves once for {LANES} micro-batches" in told
    return [*found, *(total.cpu() for total in sums.values())]


def assert_same(one: list[Any], other: list[Any]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


def test_an_error_in_a_lane_leaves_what_came_before_it() -> None:
    states: list[tuple[float, float]] = []
    for live in (True, False):
        net = nn.Linear(4, 4)
        with LiveSession(net, budget="50%") if live else nullcontext() as session:
            step = nullcontext() if session is None else session.step()
            with pytest.raises(ValueError, match="the second lane"), step:
                begin_lane(3)
                first = torch.rand(2)
                begin_lane(4)
                torch.rand(5)
                raise ValueError("the second lane")
        states.append((float(first[0]), float(torch.rand(()))))
    assert states[0] == states[1]
