"""How the work of planning grows with a graph."""

import pytest
from support.counted_calls import calls_of
from support.hand_made_plans import UNIT, training

from offload.graph.taskgraph import TaskGraph
from offload.planning.planner import Policy, build_memgraph


def calls_to_plan(graph: TaskGraph, units: int) -> int:
    return calls_of(lambda: build_memgraph(graph, {0: units * UNIT}, Policy()))


@pytest.mark.parametrize("units", [16, 80], ids=["least", "some room"])
def test_the_work_of_planning_grows_with_the_number_of_tasks(units: int) -> None:
    small, large = (training(layers) for layers in (60, 480))
    ratio = len(large.tasks) / len(small.tasks)
    assert calls_to_plan(large, units) <= 1.3 * ratio * calls_to_plan(small, units)
