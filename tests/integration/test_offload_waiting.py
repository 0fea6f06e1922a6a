"""What a norm over all gradients costs, and how weights that stay are spread over the step."""

from itertools import pairwise

import pytest
import torch
from support.live_training import training_graph
from torch import nn
from torch.nn import functional

import offload
from offload.errors import BudgetTooSmall
from offload.graph.builder import GraphBuilder
from offload.graph.memgraph import OFFLOAD, RELOAD, TASK
from offload.graph.taskgraph import Role, TaskGraph
from offload.planning.residency import Residency
from offload.plans.plan import Plan

KIB, MIB = 1 << 10, 1 << 20
WIDTH = 64


def tight(graph: TaskGraph) -> Plan:
    with pytest.raises(BudgetTooSmall) as refused:
        offload.plan(graph, 1)
    return offload.plan(graph, refused.value.needed)


# ---- residency -----------------------------------------------------------------------------------


def streamed(weights: int, trained: bool = True, nbytes: int = MIB) -> TaskGraph:
    """Layer after layer and back; `trained`: each weight is changed on the way back."""
    builder = GraphBuilder()
    x = builder.buffer("x", 4096, Role.INPUT)
    w = [builder.buffer(f"w{n}", nbytes, Role.PARAMETER) for n in range(weights)]
    kept = [x]
    for n in range(weights):
        kept.append(builder.buffer(f"y{n}", 4096, Role.ACTIVATION))
        builder.task(f"f{n}", (kept[-2], w[n]), kept[-1:], seconds=1e-3)
    g = builder.buffer("g", 4096)
    builder.task("loss", kept[-1:], (g,), phase="backward", seconds=1e-3)
    for n in reversed(range(weights)):
        changed = (w[n],) if trained else ()
        builder.task(f"b{n}", (g, kept[n], w[n]), (g, *changed), phase="backward", seconds=1e-3)
    builder.output(g)
    return builder.graph()


@pytest.mark.parametrize("percent", [10, 25, 40, 50, 66, 90])
def test_weights_that_are_streamed_are_spread_evenly(percent: int) -> None:
    """So the copy lane never has two bursts: over any stretch of layers, the share of weights to
    be streamed is the share over all, but for a weight or so."""
    weights = 40
    graph = streamed(weights)
    chosen = Residency(graph).choose({0: weights * MIB * percent // 100})
    stays = [b in chosen for b in range(1, weights + 1)]
    assert abs(sum(stays) - weights * percent / 100) <= 1
    for length in (5, 10, 20):
        counts = [sum(stays[at : at + length]) for at in range(weights - length + 1)]
        assert max(counts) - min(counts) <= 1, length


def test_where_the_link_brings_a_share_of_the_weights_in_time_the_rest_staying_is_enough() -> None:
    """rho >= 1 - n / n*: a layer computes for 1 ms, a weight takes 2 ms to come: half of them may
    be streamed, and the step waits for (nearly) nothing."""
    weights = 40
    graph = streamed(weights, trained=False)
    costs = offload.Costs(h2d=MIB / 2e-3, d2h=1e12, copy=0)
    half = offload.plan(graph, (weights // 2 + 4) * MIB, costs)
    assert half.predicted_seconds <= 1.06 * half.resident_seconds
    fifth = offload.plan(graph, (weights // 5 + 4) * MIB, costs)
    assert fifth.predicted_seconds > 1.2 * fifth.resident_seconds, "the oracle: here it must wait"


def test_weights_that_are_never_changed_are_never_copied_back() -> None:
    graph = streamed(12, trained=False)
    plan = offload.plan(graph, 3 * MIB)
    kinds = {
        kind: {graph.buffers[node.buffer].role for node in plan.memgraph.nodes if node.kind == kind}
        for kind in (OFFLOAD, RELOAD)
    }
    assert Role.PARAMETER in kinds[RELOAD]
    assert Role.PARAMETER not in kinds[OFFLOAD]
    changed = offload.plan(streamed(12), 3 * MIB)
    back = [node for node in changed.memgraph.nodes if node.kind == OFFLOAD]
    assert Role.PARAMETER in {graph.buffers[node.buffer].role for node in back}, "the oracle"


def test_frozen_layers_of_a_captured_step_are_never_copied_back() -> None:
    """As with adapters: most weights do not learn."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])
    for number, layer in enumerate(model):
        layer.requires_grad_(number % 3 == 1)
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=0.01)
    x = torch.randn(4, WIDTH)
    graph = training_graph(model, functional.mse_loss, optimizer, x, x)
    plan = tight(graph)
    names = {
        plan.graph.buffers[node.buffer].name
        for node in plan.memgraph.nodes
        if node.kind == OFFLOAD and plan.graph.buffers[node.buffer].role is Role.PARAMETER
    }
    assert names, "those that learn go home"
    assert all(name.startswith(("1.", "4.")) for name in names)


def test_clean_weights_come_once_a_pass() -> None:
    """The last layers of the forward pass are the first of the backward pass, and need not go."""
    weights = 12
    plan = offload.plan(streamed(weights, trained=False), 3 * MIB + 64 * KIB)
    comes = [node.buffer for node in plan.memgraph.nodes if node.kind == RELOAD]
    counts = [comes.count(b) for b in range(1, weights + 1)]
    assert max(counts) <= 2
    assert counts[-1] <= 1
    order = [node.task for node in plan.memgraph.nodes if node.kind == TASK]
    assert all(a < b for a, b in pairwise(order))
