"""Cheap budgets of a step: each has a plan, none is slower than asked, and larger ones never are.

A step of 7B LoRA in 8 GiB took 1.03 to 1.04 of one without a budget on an H200, where the planner
believed 1.00: what copies take from kernels is counted.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import offload
from benchmarks.offloading.nets import GptBlock, Size
from offload import BudgetTooSmall, Costs, GraphBuilder, GraphError, Role, TaskGraph
from offload.estimating.cheap_budgets import (
    CROWDING,
    FACTORS,
    CardStep,
    CheapBudgets,
    find_cheap_budgets,
)

MIB, GIB = 1 << 20, 1 << 30
COSTS = Costs(flops=1e12, memory=1e11, launch=1e-6, h2d=1e9, d2h=1e9, host_workers=4)
LOOSE = 1.02
"""The planner searches more, but not always among the same plans."""
OTHER_SEARCH = 1.1
"""On a net of a dozen layers it may end with a plan that is so much slower than the one that was
found here: a budget for 1.5 was seen at 1.58."""


def trained(sizes: list[int], states: bool = True) -> TaskGraph:
    """A net of layers of so many KiB of weights. Each keeps twice as much for its backward pass."""
    builder = GraphBuilder()
    made = [builder.buffer("x", 1 << 12, Role.INPUT)]
    weights = [builder.buffer(f"w{n}", size << 10, "parameter") for n, size in enumerate(sizes)]
    for n, (weight, size) in enumerate(zip(weights, sizes, strict=True)):
        made.append(builder.buffer(f"a{n}", size << 11, "activation"))
        builder.task(f"F{n}", (made[-2], weight), (made[-1],), flops=size * 1e6, repeatable=n % 2)
    gradient = made[-1]
    for n in reversed(range(len(sizes))):
        into = builder.buffer(f"d{n}", builder.buffers[made[n]].nbytes)
        summed = builder.buffer(f"g{n}", sizes[n] << 10, "gradient")
        reads = {made[n], made[n + 1], gradient, weights[n]}
        builder.task(f"B{n}", sorted(reads), (into, summed), flops=sizes[n] * 2e6, phase="backward")
        if states:
            state = builder.buffer(f"s{n}", sizes[n] << 11, "state")
            changed = (weights[n], state)
            builder.task(f"U{n}", (summed, *changed), changed, phase="update", traffic=sizes[n])
        gradient = into
    return builder.graph()


def ask(graph: TaskGraph, capacity: int = 1 << 50, **changed: object) -> CheapBudgets:
    step = replace(CardStep(graph, COSTS, capacity), **changed)
    return find_cheap_budgets([step])[0]


NETS = st.builds(trained, st.lists(st.integers(1, 900), min_size=1, max_size=12), st.booleans())


@given(NETS)
@settings(max_examples=20, deadline=None)
def test_the_planner_plans_within_every_budget_that_is_named(graph: TaskGraph) -> None:
    found = ask(graph)
    whole = offload.plan(graph, None, COSTS).predicted_seconds
    for factor, budget in found.cheap:
        made = offload.plan(graph, budget.budget, COSTS, optimizer="auto", placement="shim")
        assert made.device_bytes <= budget.budget
        assert made.predicted_seconds <= OTHER_SEARCH * factor * whole


def test_the_planner_plans_a_captured_gpt_within_every_budget_that_is_named() -> None:
    net = torch.nn.Sequential(*[GptBlock(Size(64, 64, 4, 4, 256, 4, 64), 0.0) for _ in range(4)])
    step = lambda x: torch.autograd.grad(net(x).square().mean(), [*net.parameters()])  # noqa: E731
    graph = offload.capture(step, torch.randn(4, 64, 64))
    found = ask(graph)
    assert found.cheap[-1][1].budget < 0.9 * found.whole.budget
    for factor, budget in found.cheap:
        made = offload.plan(graph, budget.budget, COSTS, optimizer="auto", placement="shim")
        assert made.predicted_seconds <= LOOSE * factor * found.whole.seconds


@given(NETS)
@settings(max_examples=20, deadline=None)
def test_a_larger_budget_is_never_slower_and_none_costs_more_than_was_asked(
    graph: TaskGraph,
) -> None:
    found = ask(graph)
    budgets = [budget for _, budget in found.cheap]
    assert [factor for factor, _ in found.cheap] == list(FACTORS)
    assert all(budget.factor <= factor for factor, budget in found.cheap)
    for large, small in pairwise(budgets):
        assert large.budget >= small.budget and large.seconds <= small.seconds
    assert found.whole.budget >= budgets[0].budget and budgets[-1].budget >= found.smallest
    capacities = [found.smallest + share * found.whole.budget // 4 for share in range(5)]
    answers = find_cheap_budgets([CardStep(graph, COSTS, nbytes) for nbytes in capacities])
    seconds = [answer.within.seconds for answer in answers if answer.within]
    assert len(seconds) == 5 and seconds == sorted(seconds, reverse=True)


@given(NETS)
@settings(max_examples=20, deadline=None)
def test_below_the_largest_task_nothing_fits_and_its_name_is_told(graph: TaskGraph) -> None:
    found = ask(graph)
    assert ask(graph, found.smallest).within is not None
    assert ask(graph, found.smallest - 1).within is None
    with pytest.raises(BudgetTooSmall) as refused:
        offload.plan(graph, found.smallest - 64, COSTS, optimizer="auto", placement="shim")
    assert refused.value.needed == found.smallest
    assert refused.value.task == found.largest_task


def test_a_step_that_fits_whole_says_so() -> None:
    found = ask(trained([100, 200, 300]))
    assert found.fits_whole and found.whole.factor == 1.0 and found.within == found.whole
    assert not ask(trained([100, 200, 300]), found.whole.budget - 1).fits_whole
    assert ask(trained([100, 200, 300]), found.whole.budget).fits_whole


def test_what_waits_on_the_host_is_named_and_needs_its_bytes() -> None:
    graph = trained([800] * 12)
    found = ask(graph, GIB)
    [*_, (_, least)] = found.cheap
    assert least.host_bytes >= least.weights + least.states > 0
    poor = ask(graph, found.whole.budget - 1, host_bytes=least.host_bytes // 4)
    assert all(budget.host_bytes <= least.host_bytes // 4 for _, budget in poor.cheap)
    assert poor.cheap[-1][1].budget > least.budget


def test_copies_take_from_kernels_what_was_measured_on_an_h200() -> None:
    """24.6 GiB of copies, links of 55 GB/s, memory of 4.19 TB/s: 1.03 to 1.04 of 0.704 s."""
    assert 1.03 <= 1 + CROWDING * 24.64 * GIB / 4.19e12 / 0.704 <= 1.04
    builder = GraphBuilder()
    weights = [builder.buffer(f"w{n}", 100 * MIB, "parameter") for n in range(40)]
    for number, weight in enumerate([*weights, *weights]):
        made = builder.buffer(f"y{number}", 64)
        builder.task(f"t{number}", (weight,), (made,), seconds=0.1)
    costs = replace(COSTS, memory=4.19e12, h2d=55e9, d2h=55e9)
    graph = builder.graph()
    made = offload.plan(graph, 2000 * MIB, costs, placement="shim")
    found = ask(graph, 2000 * MIB, costs=costs).within
    assert found is not None and found.seconds > made.predicted_seconds


def test_a_slower_card_shares_the_plans_and_keeps_its_own_seconds() -> None:
    graph = trained([300] * 8)
    slow = replace(graph, tasks=tuple(replace(t, seconds=1e-3) for t in graph.tasks))
    both = find_cheap_budgets([CardStep(graph, COSTS, GIB), CardStep(slow, COSTS, GIB)])
    assert both[1].whole.seconds == pytest.approx(1e-3 * len(graph.tasks), rel=0.01)
    assert both[1].whole.seconds > both[0].whole.seconds
    assert both[0].whole.budget == both[1].whole.budget


def test_a_step_that_was_placed_already_is_refused() -> None:
    builder = GraphBuilder()
    made = builder.buffer("y", 64)
    builder.task("t", (builder.buffer("w", 64, "parameter"),), (made,), lane="host")
    with pytest.raises(GraphError, match="unplaced"):
        ask(builder.graph())
