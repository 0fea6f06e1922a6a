"""Any graph, planned into little memory, proved, run in any legal order: a plain run's bits."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.any_graphs import bound, expected, graphs
from support.products import examples

import offload
from offload.errors import BudgetTooSmall, RaceFound
from offload.graph.taskgraph import TaskGraph
from offload.planning.planner import Policy, build_memgraph
from offload.planning.refusal import smallest_budget
from offload.planning.residency import most_resident

law = settings(max_examples=examples(120), deadline=None)


@law
@given(
    graph=graphs(),
    spare=st.sampled_from([0, 64, 192, 700, 5000]),
    engine=st.sampled_from(["serial", "threads"]),
    order=st.sampled_from(["priority", "random"]),
    seed=st.integers(0, 99),
)
def test_every_order_of_a_plan_gives_the_bits_of_the_plain_run(
    graph: TaskGraph, spare: int, engine: str, order: str, seed: int
) -> None:
    step = bound(graph)
    graph = step.graph
    final, returned = expected(step, 2)
    budget = {d: max(64, smallest_budget(graph, d)[0] + spare // 64 * 64) for d in graph.devices}
    plan = offload.plan(graph, budget, placement="copy")
    plan.verify()
    assert all(plan.memgraph.arenas[device] <= budget[device] for device in budget)
    with offload.Runner(plan, engine, order, seed, poison=True) as runner:
        for outputs in returned:
            for got, right in zip(runner(*step.batch), outputs, strict=True):
                assert torch.equal(got, right)
    for name, tensor in step.tensors.items():
        assert torch.equal(tensor, final[name])


@settings(max_examples=examples(300), deadline=None)
@given(
    graph=graphs(),
    spare=st.sampled_from([0, 64, 192, 700, 5000, 100_000]),
    share=st.sampled_from([0.0, 0.5, 1.0]),
    ahead=st.sampled_from([0, 1, 3, 20]),
    evict_ahead=st.sampled_from([0, 1, 3]),
    drop_ahead=st.sampled_from([0, 2, 20]),
    workers=st.sampled_from([0, 1, 16]),
)
def test_every_policy_gives_a_plan_that_the_oracle_proves(
    graph: TaskGraph,
    spare: int,
    share: float,
    ahead: int,
    evict_ahead: int,
    drop_ahead: int,
    workers: int,
) -> None:
    least = {device: smallest_budget(graph, device)[0] for device in graph.devices}
    budget = {device: (nbytes + spare) // 64 * 64 for device, nbytes in least.items()}
    room = {device: int((budget[device] - least[device]) * share) for device in least}
    policy = Policy(most_resident(graph, room), ahead, evict_ahead, drop_ahead, workers)
    memgraph = build_memgraph(graph, budget, policy)
    offload.verify(memgraph)
    assert all(memgraph.arenas[device] <= budget[device] for device in budget)


@law
@given(graph=graphs(), edge=st.integers(0, 10_000))
def test_every_edge_of_a_plan_is_needed(graph: TaskGraph, edge: int) -> None:
    """A plan's edges are reduced: none is implied by others, so each one's absence is a race."""
    memgraph = offload.plan(graph, dict(least_budgets(graph)), placement="copy").memgraph
    edges = [(n, d) for n, node in enumerate(memgraph.nodes) for d in node.deps]
    if not edges:
        return
    node, dep = edges[edge % len(edges)]
    nodes = list(memgraph.nodes)
    left = tuple(d for d in nodes[node].deps if d != dep)
    nodes[node] = replace(nodes[node], deps=left)
    with pytest.raises(RaceFound) as found:
        offload.verify(replace(memgraph, nodes=tuple(nodes)))
    assert {found.value.task_a, found.value.task_b} & {memgraph.name(node), memgraph.name(dep)}


def least_budgets(graph: TaskGraph) -> list[tuple[int, int]]:
    return [(d, max(64, smallest_budget(graph, d)[0])) for d in graph.devices]


@law
@given(graph=graphs())
def test_a_refused_budget_names_the_smallest_one_that_would_do(graph: TaskGraph) -> None:
    for device in graph.devices:
        others = dict.fromkeys(graph.devices, "1MiB")
        try:
            offload.plan(graph, {**others, device: 1}, placement="copy")
        except BudgetTooSmall as refused:
            assert refused.task in {task.name for task in graph.tasks}
            needed = refused.needed
            offload.plan(graph, {**others, device: needed}, placement="copy").verify()
            with pytest.raises(BudgetTooSmall):
                offload.plan(graph, {**others, device: needed - 1}, placement="copy")
