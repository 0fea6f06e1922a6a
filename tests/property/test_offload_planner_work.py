"""How the work of planning grows with a graph."""

import sys
from types import FrameType

import pytest

from offload.graph.builder import GraphBuilder
from offload.graph.taskgraph import TaskGraph
from offload.planning.planner import Policy, build_memgraph

UNIT = 64


def training(layers: int, units: int = 4) -> TaskGraph:
    """Forward, backward, and an update of each weight and its state."""
    builder = GraphBuilder()
    nbytes = units * UNIT
    made = [builder.buffer("x", nbytes, "input")]
    weights = [builder.buffer(f"w{n}", nbytes, "parameter") for n in range(layers)]
    states = [builder.buffer(f"m{n}", nbytes, "state") for n in range(layers)]
    for n, w in enumerate(weights):
        made.append(builder.buffer(f"a{n}", nbytes, "activation"))
        builder.task(f"f{n}", [made[-2], w], made[-1:])
    g = builder.buffer("g", nbytes, "gradient")
    builder.task("loss", made[-1:], [g], phase="backward")
    for n in reversed(range(layers)):
        d = builder.buffer(f"d{n}", nbytes, "gradient")
        builder.task(f"b{n}", [g, made[n], weights[n]], [d], phase="backward")
        builder.task(f"c{n}", [g, weights[n]], [g], phase="backward")
        changed = [weights[n], states[n]]
        builder.task(f"u{n}", [d, *changed], changed, phase="update")
    builder.output(g)
    return builder.graph()


def calls_of(graph: TaskGraph, units: int) -> int:
    """How many calls planning takes: a clock that no other program disturbs."""
    count = 0

    def tick(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(tick)
    try:
        build_memgraph(graph, {0: units * UNIT}, Policy())
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("units", [16, 80], ids=["least", "some room"])
def test_the_work_of_planning_grows_with_the_number_of_tasks(units: int) -> None:
    small, large = (training(layers) for layers in (60, 480))
    ratio = len(large.tasks) / len(small.tasks)
    assert calls_of(large, units) <= 1.3 * ratio * calls_of(small, units)
