"""How the work of planning grows with a graph."""

import sys
from types import FrameType

import pytest
from hand_made_plans import UNIT, training

from offload.graph.taskgraph import TaskGraph
from offload.planning.planner import Policy, build_memgraph


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
