"""Pieces of several micro-batches take turns, and leave behind what they leave one by one."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from property.test_offload_lowering import Dice, graphs, run

import offload
from offload import Costs, GraphBuilder, TaskGraph
from offload.graph.memgraph import OFFLOAD, RELOAD
from offload.lowering.micro_batches import take_turns

BIG = 1 << 20


@given(graphs(calls=False), st.integers(1, 4), st.data())
def test_no_order_of_them_changes_a_bit(
    made: tuple[TaskGraph, Dice], together: int, data: st.DataObject
) -> None:
    graph, dice = made
    number = st.integers(0, 3)
    turns = sorted(data.draw(number) for _ in graph.tasks)
    pairs = zip(graph.tasks, turns, strict=True)
    graph = graph.with_tasks([replace(task, turn=turn) for task, turn in pairs])
    wanted = take_turns(graph, together, nbytes=1)
    wanted.check()
    assert len(wanted.tasks) == len(graph.tasks)
    assert run(wanted, dice) == run(graph, dice)


def window(
    count: int, layers: int = 8, activation: int = 64, *, first: bool = True, last: bool = True
) -> TaskGraph:
    """Micro-batches of a step. Their gradients are added up, and used in the last one. `first`,
    `last`: whether these are the first and the last of the step."""
    builder = GraphBuilder()
    weights = [builder.buffer(f"w{n}", BIG, "parameter") for n in range(layers)]
    kind = "temporary" if first and last else "state"
    sums = [builder.buffer(f"s{n}", BIG, kind) for n in range(layers)]
    for turn in range(count):
        made = builder.buffer(f"x [{turn}]", activation, "input")
        kept: list[int] = []
        adds = not first or turn > 0
        more: dict[str, Any] = {"turn": turn, "seconds": 1e-4}
        updates = more | {"phase": "update", "seconds": 1e-5}
        for n, w in enumerate(weights):
            before, made = made, builder.buffer(f"a{n} [{turn}]", activation, "activation")
            kept.append(made)
            builder.task(f"f{n} [{turn}]", [before, w], [made], **more)
        for n in reversed(range(layers)):
            before, made = made, builder.buffer(f"d{n} [{turn}]", activation)
            g = builder.buffer(f"g{n} [{turn}]", BIG)
            read = [before, weights[n], kept[n]]
            builder.task(f"b{n} [{turn}]", read, [made, g], phase="backward", **more)
            builder.task(f"s{n} [{turn}]", [g, *sums[n : n + adds]], [sums[n]], **updates)
            if last and turn == count - 1:
                builder.task(f"u{n}", [weights[n], sums[n]], [weights[n]], **updates)
    return builder.graph()


def reloaded(plan: offload.Plan) -> int:
    """Bytes of weights."""
    buffers = plan.graph.buffers
    return sum(
        node.nbytes
        for node in plan.memgraph.nodes
        if node.kind == RELOAD and buffers[node.buffer].role == "parameter"
    )


COSTS = Costs(h2d=1e9, d2h=1e9, copy=0.0)


@pytest.mark.parametrize("count", [2, 4])
def test_weights_come_in_once_for_all_where_activations_fit(count: int) -> None:
    budget = 5 * BIG
    one = offload.plan(window(1), budget, COSTS)
    all_of_them = offload.plan(window(count), budget, COSTS)
    assert reloaded(one) >= 8 * BIG
    assert reloaded(all_of_them) <= 1.2 * reloaded(one)
    assert f"weights move once for {count} micro-batches" in " ".join(all_of_them.found.tried)


def test_where_activations_are_larger_than_weights_no_plan_is_worse_than_one_by_one() -> None:
    graph = window(4, activation=4 * BIG)
    made = offload.plan(graph, 18 * BIG, COSTS)
    tried = [line.split(": ") for line in made.found.tried]
    assert made.predicted_seconds <= min(float(time.split()[0]) for _, time in tried) * 1.01


def test_the_smallest_budget_is_that_of_a_micro_batch() -> None:
    needed = []
    for graph in (window(1, 4, first=False), window(3, 4)):
        with pytest.raises(offload.BudgetTooSmall) as refused:
            offload.plan(graph, 64, COSTS)
        needed.append(refused.value.needed)
        offload.plan(graph, refused.value.needed, COSTS).verify()
    assert needed[0] == needed[1]


def test_segments_of_the_micro_batches_take_turns() -> None:
    graph = take_turns(window(4, 2), 2)
    names = [task.name for task in graph.tasks if task.phase == "forward"]
    assert names == [f"f{layer} [{turn}]" for pair in ((0, 1), (2, 3)) for layer in (0, 1)
                     for turn in pair]  # fmt: skip


@pytest.mark.parametrize("first", [True, False])
def test_a_sum_comes_in_and_goes_out_once_a_group(first: bool) -> None:
    plan = offload.plan(window(4, first=first, last=False), 5 * BIG, COSTS)
    moved = {
        kind: sum(
            node.nbytes
            for node in plan.memgraph.nodes
            if node.kind == kind and plan.graph.buffers[node.buffer].role == "state"
        )
        for kind in (RELOAD, OFFLOAD)
    }
    assert moved[OFFLOAD] <= 8 * BIG
    assert moved[RELOAD] <= (0 if first else 8 * BIG)
