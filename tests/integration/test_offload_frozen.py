"""LoRA: frozen weights come in and are dropped; nothing ever copies them back."""

from typing import Any

import pytest
import torch
from support.live_training import training_graph
from torch import nn

import offload
from offload import BudgetTooSmall, Plan, TaskGraph
from offload.graph.memgraph import OFFLOAD, RELOAD

WIDTH, RANK, LAYERS = 256, 16, 8
"""The frozen weights alone are more than 40 % of the step: whatever the plan, some must come in."""


class Adapted(nn.Module):
    """`W x + B A x`, with `W` frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, RANK, bias=False)
        self.up = nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.frozen(x) + self.up(self.down(x))).relu()


def lora() -> tuple[nn.Module, TaskGraph]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Adapted() for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    batch = torch.randn(32, WIDTH), torch.randn(32, WIDTH)
    return model, training_graph(model, nn.functional.mse_loss, optimizer, *batch)


def at(graph: TaskGraph, share: float) -> Plan:
    try:
        return offload.plan(graph, int(offload.plan(graph).peak_bytes * share) or 1)
    except BudgetTooSmall as refused:
        return offload.plan(graph, refused.needed)


def moved(plan: Plan, kind: str) -> set[str]:
    nodes: list[Any] = [node for node in plan.memgraph.nodes if node.kind == kind]
    return {plan.graph.buffers[node.buffer].tensor for node in nodes}


@pytest.mark.parametrize("share", [0.0, 0.25, 0.4])
@pytest.mark.parametrize("optimizer", ["device", "host"])
def test_no_copy_out_of_a_plan_is_of_a_frozen_weight(share: float, optimizer: str) -> None:
    model, graph = lora()
    plan = offload.plan(graph, at(graph, share).budget[0], optimizer=optimizer)
    names = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert names <= {buffer.tensor for buffer in plan.graph.buffers}
    assert moved(plan, RELOAD) & names
    assert not moved(plan, OFFLOAD) & names
