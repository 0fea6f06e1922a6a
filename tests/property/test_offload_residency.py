"""What stays resident is spread over the layers, so that the stream of the others never bursts."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.graph_edits import grown, with_buffer

import offload
from offload import Costs, GraphBuilder, Plan, TaskGraph
from offload.graph.memgraph import OFFLOAD
from offload.planning.residency import SMALL, Residency, find_exposed

BIG = 1 << 20
COPY = 1e-3
"""Seconds that a weight takes to come in."""
COSTS = Costs(h2d=BIG / COPY, d2h=BIG / COPY, copy=0.0, launch=0.0)
LAYERS = 40


def frozen(layers: int = LAYERS, seconds: float = 1.0) -> TaskGraph:
    """Forward and backward pass through frozen weights: each is read twice and never written."""
    builder = GraphBuilder()
    made = builder.buffer("x", 64, "input")
    weights = [builder.buffer(f"w{n}", BIG, "parameter") for n in range(layers)]
    kept: list[int] = []
    for n, w in enumerate(weights):
        before, made = made, builder.buffer(f"a{n}", 64, "activation")
        kept.append(made)
        builder.task(f"f{n}", [before, w], [made], seconds=seconds)
    for n in reversed(range(layers)):
        before, made = made, builder.buffer(f"d{n}", 64)
        builder.task(
            f"b{n}", [before, weights[n], kept[n]], [made], phase="backward", seconds=seconds
        )
    builder.output(made)
    return builder.graph()


def planned(graph: TaskGraph, share: float) -> Plan:
    """With room for a share of the weights, and for those that come and go."""
    budget = int((share * LAYERS + 3) * BIG) + (1 << 16)
    return offload.plan(graph, budget, COSTS, recompute=False)


def stays(graph: TaskGraph, resident: frozenset[int]) -> list[bool]:
    weights = [b for b, buffer in enumerate(graph.buffers) if buffer.role == "parameter"]
    return [b in resident for b in weights]


@given(st.integers(1, 60), st.data())
def test_any_run_of_layers_has_its_share_of_what_stays(layers: int, data: st.DataObject) -> None:
    graph = frozen(layers)
    room = data.draw(st.integers(0, layers))
    found = stays(graph, Residency(graph).choose({0: room * BIG}))
    assert sum(found) == room
    first = data.draw(st.integers(0, layers - 1))
    last = data.draw(st.integers(first, layers - 1))
    due = (last - first + 1) * room / layers
    assert abs(sum(found[first : last + 1]) - due) <= 1 + 1e-9


@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.75, 0.9])
def test_a_share_of_one_minus_n_over_n_star_makes_streaming_free(ratio: float) -> None:
    """`ratio` is n/n*: seconds of a layer's task over those of its weight's copy. With 1 - n/n* of
    the weights resident the link has time for the others; with much less it has not."""
    graph = frozen(seconds=ratio * COPY)
    enough = planned(graph, 1 - ratio)
    assert enough.predicted_seconds <= 1.05 * enough.resident_seconds
    resident = stays(graph, enough.found.policy.resident)
    assert 0 < sum(resident) < LAYERS
    too_few = planned(graph, 0.5 * (1 - ratio) - 0.05)
    assert too_few.predicted_seconds > 1.02 * too_few.resident_seconds


@pytest.mark.parametrize("share", [-0.02, 0.1, 0.4, 0.7])
def test_frozen_weights_are_dropped_and_never_copied_back(share: float) -> None:
    graph = frozen()
    made = planned(graph, share)
    buffers = made.graph.buffers
    moved = [(node.kind, buffers[node.buffer].name) for node in made.memgraph.nodes if node.nbytes]
    assert sum(name.startswith("w") and kind != OFFLOAD for kind, name in moved) >= LAYERS * 0.25
    assert [name for kind, name in moved if kind == OFFLOAD and name.startswith("w")] == []


def step(layers: int = 6, nbytes: int = BIG) -> TaskGraph:
    """Forward, backward and update of some layers, each with a weight and a state."""
    builder = GraphBuilder()
    made = builder.buffer("x", 64, "input")
    weights = [builder.buffer(f"w{n}", nbytes, "parameter") for n in range(layers)]
    states = [builder.buffer(f"m{n}", nbytes, "state") for n in range(layers)]
    for n, w in enumerate(weights):
        before, made = made, builder.buffer(f"a{n}", 64, "activation")
        builder.task(f"f{n}", [before, w], [made])
    for n in reversed(range(layers)):
        g = builder.buffer(f"g{n}", nbytes, "gradient")
        builder.task(f"b{n}", [made, weights[n]], [g], phase="backward")
        changed = [weights[n], states[n]]
        builder.task(f"u{n}", [g, *changed], changed, phase="update")
    return builder.graph()


def names(graph: TaskGraph, room: int) -> set[str]:
    return {graph.buffers[b].name for b in Residency(graph).choose({0: room})}


def test_what_stays_fits_into_the_room() -> None:
    graph = step()
    for room in range(0, 13 * BIG, BIG // 3):
        assert len(names(graph, room)) * BIG <= room


def test_weights_stay_before_the_optimizers_state() -> None:
    """A weight moves in, in and out; its state in and out."""
    graph = step()
    assert names(graph, 6 * BIG) == {f"w{n}" for n in range(6)}


def test_what_is_not_worth_a_copy_stays_first() -> None:
    builder = grown(step(4))
    small = builder.buffer("bias", SMALL - 1, "buffer")
    builder.task("use", [small], [])
    assert names(builder.graph(), SMALL) == {"bias"}


def test_the_pieces_of_a_tensor_stay_together() -> None:
    graph = step(2)
    for number, buffer in enumerate(graph.buffers):
        if buffer.name in ("m0", "m1"):
            start = BIG * int(buffer.name == "m1")
            graph = with_buffer(graph, number, tensor="m", start=start)
    for room in range(0, 5 * BIG, BIG // 2):
        assert len(names(graph, room) & {"m0", "m1"}) in (0, 2)


def test_what_a_host_task_works_on_stays_on_the_host() -> None:
    builder = grown(step(2))
    builder.task("there", [2], [2], lane="host")  # w1
    assert names(builder.graph(), 100 * BIG) == {"w0", "m0", "m1"}


# ---- what a step begins with --------------------------------------------------------------------

A_SECOND_EACH = Costs(flops=1.0, launch=0.0, copy=0.0, h2d=float(BIG))
"""A copy of a weight takes a second."""


def working(seconds: float, layers: int = 6) -> TaskGraph:
    graph = step(layers)
    return graph.with_tasks([replace(task, seconds=seconds) for task in graph.tasks])


def begun(graph: TaskGraph, room: int) -> list[str]:
    return sorted(
        graph.buffers[b].name for b in find_exposed(graph, A_SECOND_EACH, frozenset(), {0: room})
    )


def test_nothing_hides_the_first_copy_of_what_a_step_begins_with() -> None:
    # Of 0.9 s a task: w1 is needed after 0.9 s and there after 1, w2 after 1.8 s and there after 1.
    assert begun(working(0.9), 6 * BIG) == ["w0", "w1"]
    assert begun(working(2.0), 6 * BIG) == ["w0"]


def test_what_begins_a_step_has_so_much_room_at_the_most() -> None:
    graph = working(0.1)
    assert begun(graph, 6 * BIG) == [f"w{n}" for n in range(6)]
    assert begun(graph, 2 * BIG) == ["w0", "w1"]
    assert begun(graph, BIG - 1) == []
