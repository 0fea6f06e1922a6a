"""Which activations may be made once more, and what the graph is then."""

from dataclasses import replace

import pytest
from support.graph_edits import grown, with_buffer

from offload.errors import GraphError
from offload.graph.builder import GraphBuilder
from offload.graph.costs import Costs
from offload.graph.taskgraph import Role, Task, TaskGraph
from offload.planning.recompute import candidates, recomputed, variants

MIB = 1 << 20
COSTS = Costs(launch=0, copy=0, memory=1e10, h2d=1e10, d2h=1e10)


def network(**second: object) -> TaskGraph:
    """x -norm-> a -cast-> c -mm-> y; the backward pass reads y, c and x, in that order."""
    builder = GraphBuilder()
    x = builder.buffer("x", MIB, Role.INPUT)
    w = builder.buffer("w", MIB, Role.PARAMETER)
    a, c, y, g, h = (builder.buffer(n, MIB, Role.ACTIVATION) for n in "acygh")
    builder.task("norm", (x, w), (a,), repeatable=True, traffic=3 * MIB)
    builder.task("cast", (a,), (c,), **{"repeatable": True, "traffic": 2 * MIB, **second})
    builder.task("mm", (c, w), (y,), repeatable=True, seconds=1.0)
    builder.task("loss", (y,), (g,), phase="backward")
    builder.task("mm backward", (g, c), (h,), phase="backward")
    builder.task("norm backward", (h, x, w), (w,), phase="backward")
    return builder.graph()


def test_what_dies_in_the_forward_pass_is_recomputed_with_what_is_made_of_it() -> None:
    found = {one.buffer: one for one in candidates(network(), COSTS)}
    assert found[3].chain == (2, 3)
    assert found[3].ratio == pytest.approx(5 / 2)


def test_the_clones_run_right_before_the_first_backward_reader_into_new_buffers() -> None:
    graph = recomputed(network(), {2, 3})
    graph.check()
    assert [task.name for task in graph.tasks] == [
        "norm", "cast", "mm", "loss", "norm again", "cast again", "mm backward", "norm backward",
    ]  # fmt: skip
    norm, cast, backward = graph.tasks[4:7]
    assert (norm.writes, cast.reads, cast.writes) == ((7,), (7,), (8,))
    assert backward.reads == (5, 8)
    assert (cast.recomputes, cast.phase) == ("cast", "backward")
    assert graph.spans()[1][3] == 2, "the first one is dead after the forward pass"


def test_what_may_not_run_again_is_no_candidate() -> None:
    assert 3 not in {one.buffer for one in candidates(network(repeatable=False), COSTS)}
    with pytest.raises(GraphError, match="c cannot be recomputed"):
        recomputed(network(repeatable=False), {3})


def test_what_reads_a_parameter_that_was_updated_since_is_no_candidate() -> None:
    builder = grown(network())
    late = builder.tasks.pop(4)
    builder.task("update", (1,), (1,), phase="update")
    builder.tasks.append(late)
    graph = builder.graph()
    assert 3 not in {one.buffer for one in candidates(graph, COSTS)}
    with pytest.raises(GraphError, match="w changes"):
        recomputed(graph, {2, 3})


def test_an_output_and_what_no_backward_task_reads_are_refused() -> None:
    graph = replace(network(), outputs=(3,))
    assert 3 not in {one.buffer for one in candidates(graph, COSTS)}
    with pytest.raises(GraphError, match="a is not needed again"):
        recomputed(network(), {2})


def test_small_results_beside_go_to_buffers_of_their_own_and_large_ones_forbid_it() -> None:
    builder = grown(network())
    mean = builder.buffer("mean", 64)
    builder.tasks[0] = Task("norm", (0, 1), (2, mean), repeatable=True)
    graph = builder.graph()
    assert recomputed(graph, {2, 3}).tasks[4].writes == (8, 9)
    graph = with_buffer(graph, mean, nbytes=MIB)
    assert 3 not in {one.buffer for one in candidates(graph, COSTS)}


def test_shares_of_what_can_be_are_recomputed_the_cheapest_first_and_none_twice() -> None:
    graph = network()
    cheapest, *_ = candidates(graph, COSTS)
    found = dict(variants(graph, COSTS))
    assert [*found] == ["none", "100% of what can be", "50% of what can be"]
    again = {
        name: [t.recomputes for t in made.tasks if t.recomputes] for name, made in found.items()
    }
    assert again["none"] == [] and len(again["100% of what can be"]) == 3
    makers = [
        graph.tasks[n].name for n in range(4) if set(graph.tasks[n].writes) & {*cheapest.chain}
    ]
    assert again["50% of what can be"] == makers


def test_a_step_without_a_backward_pass_has_one_variant() -> None:
    builder = GraphBuilder()
    x, y = builder.buffer("x", MIB, Role.INPUT), builder.buffer("y", MIB)
    builder.task("f", (x,), (y,), repeatable=True)
    builder.output(y)
    graph = builder.graph()
    assert [name for name, _ in variants(graph, COSTS)] == ["none"]
