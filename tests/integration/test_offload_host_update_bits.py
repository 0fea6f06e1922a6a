"""Updates on the host leave every bit as eager mode does."""

import copy
from typing import Any

import pytest
import torch
from support.live_training import LiveTraining, training_graph
from support.plan_amounts import least
from torch import nn
from torch.nn import functional

import offload
from offload.graph.costs import Costs
from offload.lowering.host_updates import weigh_moves
from offload.plans.plan import Plan

WIDTH = 64


class Trained:
    """A net, its eager twin, and three steps of both."""

    def __init__(self, fused: bool | None, precise: bool = True, dtype: Any = torch.float32):
        torch.manual_seed(0)
        layers = [part for _ in range(3) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        self.model = nn.Sequential(*layers).to(dtype)
        self.twin = copy.deepcopy(self.model)
        self.precise = precise
        self.optimizer, self.other = (
            torch.optim.AdamW(m.parameters(), lr=0.01, fused=fused) for m in (self.model, self.twin)
        )
        self.batches = [
            (torch.randn(8, WIDTH, dtype=dtype), torch.randn(8, WIDTH, dtype=dtype))
            for _ in range(3)
        ]
        self.graph = training_graph(
            self.model, functional.mse_loss, self.optimizer, *self.batches[0], around=self.around
        )

    def around(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16, enabled=not self.precise)

    def compare(self, plan: Plan, engine: str = "threads") -> None:
        plan.verify()
        how: Any = {"engine": engine, "order": "random", "seed": 1, "host_workers": 3}
        with LiveTraining(
            self.model,
            functional.mse_loss,
            self.optimizer,
            plan,
            around=self.around,
            poison=True,
            **how,
        ) as step:
            for x, y in self.batches:
                (loss,) = step(x, y)
                self.other.zero_grad()
                with self.around():
                    wanted = functional.mse_loss(self.twin(x), y)
                wanted.backward()
                self.other.step()
                assert torch.equal(loss, wanted.detach())
        for one, other in zip(self.model.parameters(), self.twin.parameters(), strict=True):
            assert torch.equal(one, other)
            for key, tensor in self.optimizer.state[one].items():
                assert torch.equal(tensor, self.other.state[other][key]), key


@pytest.mark.parametrize("placement", ["auto", "copy"])
@pytest.mark.parametrize("fused", [None, True])
def test_updates_on_the_host_leave_the_bits_of_eager(fused: bool | None, placement: str) -> None:
    trained = Trained(fused)
    budget = least(trained.graph, optimizer="host", placement=placement)
    plan = offload.plan(trained.graph, budget, optimizer="host", placement=placement)
    updates = {task.lane for task in plan.graph.tasks if task.phase == "update"}
    assert updates == {"host"}
    trained.compare(plan)
    trained.compare(plan, "serial")


def test_parameters_of_half_precision_are_updated_on_the_device() -> None:
    trained = Trained(None, dtype=torch.bfloat16)
    plan = offload.plan(trained.graph, least(trained.graph), optimizer="host")
    assert "host" not in {task.lane for task in plan.graph.tasks}
    assert "none can run on the host" in plan.explain()
    trained.compare(plan)


@pytest.mark.gpu
def test_an_update_of_a_gpu_is_not_taken_to_cost_the_host_nothing() -> None:
    """Its seconds were measured elsewhere, so the bytes that it moves count."""
    net, x = nn.Linear(1024, 1024).cuda(), torch.randn(4, 1024, device="cuda")
    graph = training_graph(net, functional.mse_loss, torch.optim.AdamW(net.parameters()), x, x)
    slow = Costs(host_memory=1e9)
    assert max(move.seconds for move in weigh_moves(graph, slow).values()) > 3 * 4 * 1024**2 / 1e9
