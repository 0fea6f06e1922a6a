"""Several micro-batches in one graph leave behind what they leave behind one after the other."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
from graph_edits import grown
from hypothesis import assume, given
from hypothesis import strategies as st
from test_offload_lowering import Dice, graphs, run

import offload
from offload import Costs, GraphBuilder, GraphError, TaskGraph
from offload.graph.memgraph import OFFLOAD, RELOAD
from offload.lowering.micro_batches import layer_by_layer, orders
from offload.lowering.passes import early_updates, grouped, in_turn

BIG = 1 << 20


@given(graphs(calls=False), st.integers(1, 4), st.integers(1, 4), st.data())
def test_no_order_of_them_changes_a_bit(
    made: tuple[TaskGraph, Dice], count: int, together: int, data: st.DataObject
) -> None:
    graph, dice = made
    assume(not any(graph.buffers[b].persistent for b in graph.outputs))
    drawing = {n for n, task in enumerate(graph.tasks) if task.name.startswith("draw")}
    graph = graph.with_tasks([replace(t, random=n in drawing) for n, t in enumerate(graph.tasks)])
    several = [data.draw(st.sampled_from([graph, early_updates(graph)])) for _ in range(count)]
    joined = in_turn(several)
    expected = one_after_the_other(several, dice)
    assert run(with_inputs(joined, graph), dice) == expected
    wanted = layer_by_layer(joined, together, nbytes=1)
    wanted.check()
    assert len(wanted.tasks) == len(joined.tasks)
    assert run(with_inputs(wanted, graph), dice) == expected


def with_inputs(joined: TaskGraph, graph: TaskGraph) -> TaskGraph:
    """Every micro-batch is given what the graph alone is given."""
    [given] = [b for b, buffer in enumerate(graph.buffers) if buffer.role == "input"]
    alone = TaskGraph(graph.buffers, (), (given,))
    *_, contents = run(alone, Dice())
    begun = grown(joined.with_tasks([]))
    for b, buffer in enumerate(joined.buffers):
        if buffer.role == "input":
            begun.task("begin", [], [b], kernel=put(contents))
    begun.tasks += [replace(task, after=()) for task in joined.tasks]
    return begun.graph()


def one_after_the_other(several: list[TaskGraph], dice: Dice) -> list[bytes]:
    """Persistent buffers after the last, and the outputs of all. A graph that begins with what the
    one before has left is made by writing it there first."""
    outputs: list[bytes] = []
    kept: list[bytes] = []
    drawn = 0
    for graph in several:
        persistent = [b for b, buffer in enumerate(graph.buffers) if buffer.persistent]
        begun = grown(graph.with_tasks([]))
        for b, contents in zip(persistent, kept, strict=False):
            begun.task("begin", [], [b], kernel=put(contents))
        begun.task("skip draws", [], [], kernel=lambda *_, n=drawn: setattr(dice, "drawn", n))
        begun.tasks += [replace(task, after=()) for task in graph.tasks]
        found = run(begun.graph(), dice)
        drawn = dice.drawn
        kept, outputs = found[: len(persistent)], outputs + found[len(persistent) :]
    return [*kept, *outputs]


def put(contents: bytes) -> Callable[[object, list[bytearray]], None]:
    def kernel(_: object, writes: list[bytearray]) -> None:
        writes[0][:] = contents

    return kernel


def micro_batch(layers: int, first: bool, last: bool, activation: int = 64) -> TaskGraph:
    """Forward and backward pass; gradients are added up, and used in the last one."""
    builder = GraphBuilder()
    made = builder.buffer("x", activation, "input")
    weights = [builder.buffer(f"w{n}", BIG, "parameter") for n in range(layers)]
    sums = [builder.buffer(f"s{n}", BIG, "sum") for n in range(layers)]
    kept: list[int] = []
    for n, w in enumerate(weights):
        before, made = made, builder.buffer(f"a{n}", activation, "activation")
        kept.append(made)
        builder.task(f"f{n}", [before, w], [made], seconds=1e-4)
    for n in reversed(range(layers)):
        before, made = made, builder.buffer(f"d{n}", activation)
        g = builder.buffer(f"g{n}", BIG, "gradient")
        builder.task(
            f"b{n}", [before, weights[n], kept[n]], [made, g], phase="backward", seconds=1e-4
        )
        builder.task(f"s{n}", [g, *([] if first else [sums[n]])], [sums[n]], phase="update",
                   seconds=1e-5)  # fmt: skip
        if last:
            builder.task(f"u{n}", [weights[n], sums[n]], [weights[n]], phase="update", seconds=1e-5)
    return builder.graph()


def window(count: int, layers: int = 8, activation: int = 64) -> TaskGraph:
    """All micro-batches of a step."""
    parts = [micro_batch(layers, n == 0, n == count - 1, activation) for n in range(count)]
    return in_turn(parts)


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
    one = offload.plan(micro_batch(8, True, True), budget, COSTS)
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
    for graph in (micro_batch(4, False, True), window(3, 4)):
        with pytest.raises(offload.BudgetTooSmall) as refused:
            offload.plan(graph, 64, COSTS)
        needed.append(refused.value.needed)
        offload.plan(graph, refused.value.needed, COSTS).verify()
    assert needed[0] == needed[1]


def test_a_sum_is_a_gradient_that_nobody_keeps() -> None:
    graph = window(3, 2)
    assert [b.name for b in graph.buffers if b.persistent] == ["w0", "w1"]
    assert sum(b.role == "gradient" and b.name.startswith("s") for b in graph.buffers) == 2
    alone = [micro_batch(2, False, False), micro_batch(2, False, True)]
    with pytest.raises(GraphError, match="no task has written it"):
        in_turn(alone)


def test_segments_of_the_micro_batches_take_turns() -> None:
    graph = layer_by_layer(window(4, 2), 2)
    names = [task.name for task in graph.tasks if task.phase == "forward"]
    assert names == [f"f{layer} [{turn}]" for pair in ((0, 1), (2, 3)) for layer in (0, 1)
                     for turn in pair]  # fmt: skip


def test_each_order_is_told_once() -> None:
    assert [name for name, _ in orders(micro_batch(2, True, True))] == [""]
    assert len([*orders(window(2, 2))]) == 2
    assert len([*orders(window(4, 2))]) == 3


def test_random_numbers_are_drawn_in_the_order_of_the_micro_batches() -> None:
    builder = GraphBuilder()
    w = builder.buffer("w", BIG, "parameter")
    for n in range(2):
        mask = builder.buffer(f"mask{n}", 64)
        builder.task(f"draw{n}", [], [mask], random=True, after=(n - 1,) if n else ())
    graph = builder.graph()
    single = graph.with_tasks(graph.tasks[:1])
    joined = in_turn([single, graph, single])
    assert [task.after for task in joined.tasks] == [(), (0,), (1,), (2,)]
    assert w in {b for b, buffer in enumerate(joined.buffers) if buffer.persistent}


def test_what_is_returned_must_not_change_later() -> None:
    builder = GraphBuilder()
    w = builder.buffer("w", 64, "parameter")
    builder.task("u", [w], [w])
    builder.output(w)
    graph = builder.graph()
    with pytest.raises(GraphError, match="returns w"):
        in_turn([graph, graph])


def test_tasks_that_were_put_together_take_turns_too() -> None:
    parts = [grouped(micro_batch(3, n == 0, n == 2)) for n in range(3)]
    graph = layer_by_layer(in_turn(parts), 3)
    places = [task.turn for task in graph.tasks]
    assert len([*itertools.groupby(places)]) > 6


# ---- groups that update nothing -----------------------------------------------------------------


def gradients(layers: int, first: bool) -> TaskGraph:
    """A micro-batch that adds its gradients to the sums."""
    return micro_batch(layers, first, last=False)


@given(st.integers(1, 5), st.booleans(), st.integers(1, 5))
def test_sums_of_a_group_without_update_stay_and_are_added_to_in_its_order(
    count: int, first: bool, together: int
) -> None:
    parts = [gradients(3, first and n == 0) for n in range(count)]
    joined = in_turn(parts)
    for graph in (joined, layer_by_layer(joined, together, nbytes=1)):
        sums = [b for b, buffer in enumerate(graph.buffers) if buffer.role == "sum"]
        assert [graph.buffers[b].name for b in sums] == ["s0", "s1", "s2"]
        for b in sums:
            adding = [task for task in graph.tasks if b in task.writes]
            assert [task.turn for task in adding] == [*range(count)]
            assert [b in task.reads for task in adding] == [not first, *[True] * (count - 1)]


@given(st.integers(1, 4), st.data())
def test_sums_die_where_one_of_the_micro_batches_updates(count: int, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, count - 1))
    graph = in_turn([micro_batch(2, n == 0, n == at) for n in range(count)])
    assert not [buffer for buffer in graph.buffers if buffer.role == "sum"]


@pytest.mark.parametrize("first", [True, False])
def test_a_sum_comes_in_and_goes_out_once_a_group(first: bool) -> None:
    count = 4
    graph = in_turn([gradients(8, first and n == 0) for n in range(count)])
    plan = offload.plan(graph, 5 * BIG, COSTS)
    moved = {
        kind: sum(
            node.nbytes
            for node in plan.memgraph.nodes
            if node.kind == kind and plan.graph.buffers[node.buffer].role == "sum"
        )
        for kind in (RELOAD, OFFLOAD)
    }
    assert moved[OFFLOAD] <= 8 * BIG
    assert moved[RELOAD] <= (0 if first else 8 * BIG)
    assert "gradient sums" in plan.explain()
