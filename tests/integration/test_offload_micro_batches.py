"""Captured micro-batches in one graph: eager's bits in any legal order, weights streamed once."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from products import every_value
from torch import nn

import offload
from offload import BudgetTooSmall, Plan, Runner, TaskGraph
from offload.graph.memgraph import RELOAD
from offload.lowering.micro_batches import orders
from offload.lowering.passes import in_turn
from offload.tracing.capture import capture_step
from offload.tracing.training import Clip, TrainingStep

WIDTH, LAYERS = 128, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.norm(self.inner(x).relu()))


def net() -> nn.Module:
    """Statistics, random numbers, a weight that is used twice, one without a gradient."""
    torch.manual_seed(0)
    blocks = [Block() for _ in range(LAYERS)]
    blocks[-1].inner.weight = blocks[0].inner.weight
    blocks[1].inner.weight.requires_grad_(False)
    return nn.Sequential(*blocks)


def batches(sizes: Sequence[int]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(size, WIDTH) for size in sizes]


class Captured:
    """A module, and its micro-batches as graphs."""

    def __init__(self, data: Sequence[torch.Tensor], clip: Clip | None) -> None:
        self.module = net()
        used = [p for p in self.module.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(used, 1e-2)
        sums: dict[Any, torch.Tensor] = {}
        self.graphs: list[TaskGraph] = []
        for n, x in enumerate(data):
            last = n == len(data) - 1
            held = frozenset(sums) if n else frozenset()
            step = TrainingStep(
                self.forward, self.optimizer, {"": self.module}, last, sums, held, clip
            )
            self.graphs.append(capture_step(step, x))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        out = self.module(x)
        return out.square().mean() / 3, (out.sum(),)


def eager(steps: int, data: Sequence[torch.Tensor], clip: Clip | None) -> tuple[Any, list[Any]]:
    module = net()
    used = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(used, 1e-2)
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        for x in data:
            out = module(x)
            loss = out.square().mean() / 3
            loss.backward()
            found += [loss.detach(), out.detach().sum()]
        if clip is not None:
            nn.utils.clip_grad_norm_(used, clip.limit)
        optimizer.step()
    return {**module.state_dict(), **optimizer.state_dict()["state"]}, found


def planned(graph: TaskGraph, share: float) -> Plan:
    try:
        return offload.plan(graph, int(offload.plan(graph).peak_bytes * share) or 1)
    except BudgetTooSmall as refused:
        return offload.plan(graph, refused.needed)


@pytest.mark.parametrize("share, order", every_value([2.0, 0.4, 0.0], [0, 1, 2]))
def test_a_window_is_eagers_in_every_order(share: float, order: int) -> None:
    clip = Clip(0.01) if order else None
    data = batches([16, 16, 16, 5])
    captured = Captured(data, clip)
    graph = [*orders(in_turn(captured.graphs))][order][1]
    expected, losses = eager(2, data, clip)
    found: list[Any] = []
    with Runner(planned(graph, share), "threads", "random", 3, poison=True, key="all") as runner:
        for step in range(2):
            torch.manual_seed(step)
            found += runner.run("all", *data)
        assert not [n for n, (a, b) in enumerate(zip(found, losses, strict=True)) if a != b]
    state = {**captured.module.state_dict(), **captured.optimizer.state_dict()["state"]}
    assert expected.keys() == state.keys()
    for name, value in expected.items():
        pairs = value.items() if isinstance(value, dict) else [(None, value)]
        for key, tensor in pairs:
            other = state[name] if key is None else state[name][key]
            assert torch.equal(tensor, other), (name, key)


def test_separate_graphs_and_all_in_one_share_a_runner() -> None:
    data = batches([16, 16, 5])
    captured = Captured(data, None)
    joined = in_turn(captured.graphs)
    expected, _ = eager(3, data, None)
    with Runner(planned(joined, 0.4), key="all", poison=True) as runner:
        for n, graph in enumerate(captured.graphs):
            runner.add(n, graph)
        for step in range(3):
            torch.manual_seed(step)
            if step == 1:
                for n, x in enumerate(data):
                    runner.run(n, x)
            else:
                runner.run("all", *data)
    for name, tensor in captured.module.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_the_weights_of_a_captured_step_come_in_once_for_all() -> None:
    data = batches([16] * 4)
    # No seconds that were measured: a busy machine must not make kernels slower than copies.
    graphs = [
        graph.with_tasks([replace(task, seconds=2e-5) for task in graph.tasks])
        for graph in Captured(data, None).graphs
    ]
    [budget] = planned(graphs[-1], 0.35).budget.values()
    slow = offload.Costs(h2d=2e8, d2h=2e8)
    separate = [offload.plan(graph, budget, slow) for graph in graphs]
    together = offload.plan(in_turn(graphs), budget, slow)
    assert weights(together) < 0.6 * sum(map(weights, separate))
    assert together.predicted_seconds < 0.9 * sum(plan.predicted_seconds for plan in separate)
    assert "a weight moves once for 4 micro-batches" in together.explain()


def weights(plan: Plan) -> int:
    buffers = plan.graph.buffers
    return sum(
        node.nbytes
        for node in plan.memgraph.nodes
        if node.kind == RELOAD and buffers[node.buffer].role == "parameter"
    )
