"""What the planner copies, and how often; what it drops without a copy, and when."""

from collections import Counter

import pytest
from support.hand_made_plans import UNIT, copies, planned, training, uses

from offload.graph.builder import GraphBuilder
from offload.graph.memgraph import OFFLOAD, RELOAD, TASK, MemGraph
from offload.graph.taskgraph import TaskGraph
from offload.planning.planner import Policy


def test_weights_that_nobody_changes_are_dropped_and_never_copied_back() -> None:
    builder = GraphBuilder()
    x = builder.buffer("x", UNIT, "input")
    weights = [builder.buffer(f"w{n}", 4 * UNIT, "parameter") for n in range(8)]
    for sweep in range(3):
        for n, w in enumerate(weights):
            before, x = x, builder.buffer(f"x{sweep}.{n}", UNIT)
            builder.task(f"t{sweep}.{n}", [before, w], [x])
    builder.output(x)
    graph = builder.graph()
    for units in (6, 10, 20):
        memgraph = planned(graph, units)
        assert not any(name.startswith("w") for name in copies(memgraph, OFFLOAD))
        assert len(copies(memgraph, RELOAD)) >= 8 * (1 if units >= 34 else 2)


@pytest.mark.parametrize("units", [16, 24, 40, 200])
def test_what_changed_is_copied_back_once_for_every_time_that_it_leaves(units: int) -> None:
    graph = training(5)
    memgraph = planned(graph, units)
    gone = Counter(copies(memgraph, OFFLOAD))
    for n in range(5):
        # A single task changes each: whatever its comings and goings, one copy holds the change.
        assert gone[f"w{n}"] == gone[f"m{n}"] == 1


def test_a_tensor_changed_twice_with_room_to_stay_is_copied_back_once() -> None:
    builder = GraphBuilder()
    w = builder.buffer("w", UNIT, "parameter")
    for n in range(5):
        builder.task(f"change {n}", [w], [w])
    graph = builder.graph()
    memgraph = planned(graph, 4)
    assert (copies(memgraph, RELOAD), copies(memgraph, OFFLOAD)) == (["w"], ["w"])


def test_a_tensor_that_is_made_anew_is_not_loaded_before() -> None:
    builder = GraphBuilder()
    w = builder.buffer("w", UNIT, "buffer")
    builder.task("fill", [], [w])
    graph = builder.graph()
    memgraph = planned(graph, 4)
    assert (copies(memgraph, RELOAD), copies(memgraph, OFFLOAD)) == ([], ["w"])


def test_an_activation_that_was_offloaded_and_is_clean_is_dropped_the_second_time() -> None:
    graph = uses("dabcdabc", "abcd")
    memgraph = planned(graph, 2, Policy(ahead=0))
    gone = Counter(copies(memgraph, OFFLOAD))
    assert max(gone.values()) == 1
    assert max(Counter(copies(memgraph, RELOAD)).values()) == 2


def test_what_is_dead_is_dropped_without_a_copy() -> None:
    graph = uses("a", "abcdef")
    memgraph = planned(graph, 2, Policy(ahead=0))
    # Nobody reads b to f: they leave as they came.
    assert set(copies(memgraph, OFFLOAD)) <= {"a"}


def forwards_and_back(kind: str) -> TaskGraph:
    """a b c d d c b a, each of one unit: weights, or what a task of its own made before."""
    builder = GraphBuilder()
    buffers = [builder.buffer(name, UNIT, kind) for name in "abcd"]
    if kind == "activation":
        for b in buffers:
            builder.task(f"make {builder.buffers[b].name}", [], [b])
    for phase, order in (("forward", buffers), ("backward", buffers[::-1])):
        for b in order:
            builder.task(f"{phase} {builder.buffers[b].name}", [b], [], phase=phase)
    return builder.graph()


def waits_for(memgraph: MemGraph, name: str, times: int = 1) -> str:
    """The task after which the `times`-th reload of a buffer may begin."""
    buffers, tasks = memgraph.graph.buffers, memgraph.graph.tasks
    reloads = [
        node for node in memgraph.nodes if node.kind == RELOAD and buffers[node.buffer].name == name
    ]
    found = [memgraph.nodes[d] for d in reloads[times - 1].deps]
    return max((tasks[n.task].name for n in found if n.kind == TASK), default="")


def test_what_the_host_has_too_is_dropped_long_before_its_place_is_needed() -> None:
    """a goes when it was used, not when c is due: c comes while b is worked on."""
    graph = forwards_and_back("parameter")
    at_its_turn = planned(graph, 3, Policy(ahead=8))
    early = planned(graph, 3, Policy(ahead=8, drop_ahead=8))
    assert waits_for(early, "d") == "forward a"
    assert copies(early, RELOAD) == copies(at_its_turn, RELOAD) == [*"abcda"]
    order = [(node.kind, node.task) for node in early.nodes]
    later = [(node.kind, node.task) for node in at_its_turn.nodes]
    assert order.index((RELOAD, 3)) < order.index((TASK, 1))
    assert later.index((RELOAD, 3)) > later.index((TASK, 2))


@pytest.mark.parametrize("units", [5, 7])
def test_what_would_have_to_be_copied_out_is_not_dropped(units: int) -> None:
    """Weights that the host has are; activations wait for the turn of the task."""
    graph = training(4, units=1)
    at_its_turn = planned(graph, units, Policy(ahead=8))
    early = planned(graph, units, Policy(ahead=8, drop_ahead=8))
    assert early.nodes != at_its_turn.nodes
    assert copies(early, OFFLOAD) == copies(at_its_turn, OFFLOAD)


def test_what_is_needed_sooner_is_not_dropped() -> None:
    """On the way back every weight is needed before the one that would take its place."""
    graph = forwards_and_back("parameter")
    memgraph = planned(graph, 2, Policy(ahead=8, drop_ahead=8))
    assert copies(memgraph, RELOAD) == [*"abcdba"]
