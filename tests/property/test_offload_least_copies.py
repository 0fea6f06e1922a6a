"""No plan is faster than the copies that its residents leave to do."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.any_graphs import graphs
from support.products import examples

import offload
from offload import Costs, GraphBuilder, TaskGraph
from offload.errors import BudgetTooSmall
from offload.planning import search
from offload.planning.planner import build_memgraph
from offload.planning.policies import Policy
from offload.planning.simulator import least_seconds_with, simulate
from offload.planning.wanted import peak_bytes

COSTS = Costs(flops=1e12, memory=1e12, launch=1e-9, h2d=1e6, d2h=3e6, copy=1e-7)
"""Copies take long beside tasks."""


@settings(max_examples=examples(100))
@given(graphs(), st.data())
def test_no_plan_takes_less_than_its_least_copies(graph: TaskGraph, data: st.DataObject) -> None:
    whole = {d: peak_bytes(graph, d) for d in graph.devices}
    room = {d: int(data.draw(st.floats(0.3, 2)) * n) // 64 * 64 for d, n in whole.items()}
    persistent = [b for b, buffer in enumerate(graph.buffers) if buffer.persistent]
    resident = frozenset(b for b in persistent if data.draw(st.booleans()))
    far = data.draw(st.sampled_from((0, 2, 64)))
    policy = Policy(resident, ahead=far, evict_ahead=far // 2, drop_ahead=far)
    try:
        memgraph = build_memgraph(graph, room, policy)
    except BudgetTooSmall:
        return
    least = least_seconds_with(graph, COSTS, resident, {})
    assert simulate(memgraph, COSTS).makespan >= least * (1 - 1e-9)


def chain(layers: int) -> TaskGraph:
    """Each layer has a weight, which is read and then updated."""
    builder = GraphBuilder()
    made = builder.buffer("x", 64, "input")
    weights = [builder.buffer(f"w{n}", 1 << 16, "parameter") for n in range(layers)]
    for n, w in enumerate(weights):
        before, made = made, builder.buffer(f"a{n}", 64, "activation")
        builder.task(f"f{n}", [before, w], [made], seconds=1e-9)
    for n, w in enumerate(weights):
        builder.task(f"u{n}", [w, made], [w], phase="update", seconds=1e-9)
    builder.output(made)
    return builder.graph()


@pytest.mark.parametrize("kept", [0, 3, 8])
def test_each_weight_that_is_not_resident_comes_and_goes_once(kept: int) -> None:
    costs = Costs(h2d=1e6, d2h=1e6, copy=0.0)
    graph = chain(8)
    weights = [b for b, buffer in enumerate(graph.buffers) if buffer.persistent]
    least = least_seconds_with(graph, costs, weights[:kept], {})
    assert math.isclose(least, (8 - kept) * (1 << 16) / 1e6 + 64 / 1e6)


def test_plans_that_cannot_be_the_best_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = chain(24)
    made = offload.plan(graph, 22 << 16, COSTS)
    hopeful = len(made.found.tried)
    monkeypatch.setattr(search, "least_seconds_with", lambda *_: 0.0)
    every = offload.plan(graph, 22 << 16, COSTS)
    assert hopeful < len(every.found.tried)
    assert made.predicted_seconds == every.predicted_seconds
    assert made.memgraph.nodes == every.memgraph.nodes
