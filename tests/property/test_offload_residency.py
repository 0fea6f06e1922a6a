"""What stays resident is spread over the layers, so that the stream of the others never bursts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import offload
from offload import Costs, GraphBuilder, Plan, TaskGraph
from offload.graph.memgraph import OFFLOAD
from offload.planning.residency import most_resident

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
    found = stays(graph, most_resident(graph, {0: room * BIG}))
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
