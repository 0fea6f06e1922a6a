"""A step on several devices: eager PyTorch's bits, wherever its tasks run.

The devices are arenas of the CPU, and the nodes run in any order that the plan allows, dead memory
being NaN.
"""

from dataclasses import replace
from typing import Any

import pytest
from support import offload_training as training
from support.placed_training import COSTS, PlacingPlanner, compare_training
from support.products import every_value

import offload
from offload import TaskGraph
from offload.errors import GraphError
from offload.graph.builder import GraphBuilder
from offload.graph.taskgraph import Role
from offload.lowering.device_order import list_device_orders
from offload.lowering.device_placing import place_tasks


@pytest.mark.parametrize(
    "name, devices, laps, share",
    every_value(["gpt", "resnet18", "llama"], [2, 3, 4], [1, 2], [1.0, 0.4, 0.0]),
)
def test_a_step_on_several_devices_has_the_bits_of_eager(
    name: str, devices: int, laps: int, share: float
) -> None:
    how: dict[str, Any] = {"engine": "threads", "order": "random", "seed": devices, "poison": True}
    planner = PlacingPlanner(devices, laps, share, **how)
    compare_training(training.trained_once(name), planner)
    assert planner.last is not None
    assert 2 <= len({task.device for task in planner.last.graph.tasks}) <= devices
    assert any(node.kind == "send" for node in planner.last.memgraph.nodes)


def layers(count: int, turns: int = 2) -> TaskGraph:
    """Micro-batches: forward, backward with sums of gradients, updates."""
    builder = GraphBuilder()
    weights = [builder.buffer(f"w{n}", 640, Role.PARAMETER) for n in range(count)]
    states = [builder.buffer(f"s{n}", 640, Role.STATE) for n in range(count)]
    sums = [builder.buffer(f"g{n}", 640, Role.GRADIENT) for n in range(count)]
    for turn in range(turns):
        x = [builder.buffer(f"x{turn}", 64, Role.INPUT)]
        for n in range(count):
            x.append(builder.buffer(f"a{turn}.{n}", 64, Role.ACTIVATION))
            builder.task(f"f{turn}.{n}", (x[n], weights[n]), (x[n + 1],), turn=turn, seconds=1.0)
        back, how = x[-1], {"turn": turn, "phase": "backward", "seconds": 2.0}
        for n in reversed(range(count)):
            made = builder.buffer(f"d{turn}.{n}", 64)
            reads = (back, x[n], weights[n], *sums[n : n + bool(turn)])
            builder.task(f"b{turn}.{n}", reads, (sums[n], made), **how)
            back = made
    for n in range(count):
        changed = (weights[n], states[n])
        builder.task(f"u{n}", (*changed, sums[n]), changed, phase="update", seconds=0.5)
    return builder.graph()


def test_layers_go_to_devices_in_turn_and_what_belongs_to_them_goes_with_them() -> None:
    placed = place_tasks(layers(8), 2, COSTS, laps=(2,))
    of_layer: dict[int, set[int]] = {}
    for task in placed.tasks:
        of_layer.setdefault(int(task.name[-1]), set()).add(task.device)
    assert [of_layer[n] for n in range(8)] == [{0}, {0}, {1}, {1}, {0}, {0}, {1}, {1}]


def test_devices_work_at_the_same_time() -> None:
    graph = layers(8)
    alone = offload.plan(graph, None, COSTS).predicted_seconds
    both = offload.plan(place_tasks(graph, 2, COSTS, laps=(2,)), None, COSTS).predicted_seconds
    assert both < 0.75 * alone, "two micro-batches overlap"


def test_a_plan_may_be_asked_for_several_devices() -> None:
    made = offload.plan(layers(8), 4096, COSTS, devices=2)
    made.verify()
    assert made.graph.devices == [0, 1]
    assert "placed on 2 devices" in made.explain()
    whole = offload.plan(layers(1), None, COSTS, devices=2)
    assert {task.device for task in whole.graph.tasks} == {0}
    assert "1 device of 2 asked, because it cannot be cut further" in whole.explain()


def test_the_order_of_several_devices_that_is_fastest_in_simulation_is_planned() -> None:
    placed = place_tasks(layers(8, turns=8), 2, COSTS, laps=(2,))
    made = offload.plan(placed, 6000, COSTS)
    made.verify()
    seconds = [line.rsplit(": ", 1) for line in made.found.tried]
    assert {name.split()[0] for name, _ in seconds if "go round together" in name} >= {"4", "2"}
    assert f"{made.predicted_seconds:.3g} s" == min(took for _, took in seconds)
    assert "each micro-batch goes round them 2 times" in made.explain()
    turns = [task.turn for task in made.source.tasks if task.name in {f"f{n}.0" for n in range(8)}]
    assert turns == [*range(8)]


def test_a_budget_that_one_device_cannot_keep_names_the_device() -> None:
    with pytest.raises(offload.BudgetTooSmall, match=r"needed on device [01] at task .*1.0 KiB"):
        offload.plan(layers(8), 1024, COSTS, devices=2)


def test_what_cannot_be_placed_is_refused() -> None:
    with pytest.raises(GraphError, match="devices=0: give 1 or more"):
        offload.plan(layers(2), devices=0)
    placed = place_tasks(layers(8), 2, COSTS)
    with pytest.raises(GraphError, match=r"the tasks name devices \[0, 1\] already"):
        offload.plan(placed, devices=2)
    alone = offload.plan(layers(8))
    with pytest.raises(GraphError, match=r"on devices \[1\], and this plan is for devices \[0\]"):
        alone.replan(placed)


def test_an_evaluation_runs_where_training_has_left_the_weights() -> None:
    """By itself, a single pass would go round the devices once."""
    graph = layers(8)
    placed = place_tasks(graph, 2, COSTS, laps=(2,))
    homes = dict(zip([f"w{n}" for n in range(8)], placed.home_devices(), strict=False))
    assert [*homes.values()] == [0, 0, 1, 1, 0, 0, 1, 1]
    forward = graph.with_tasks([task for task in graph.tasks if task.name.startswith("f0")])
    assert [task.device for task in place_tasks(forward, 2, COSTS).tasks] == [0] * 4 + [1] * 4
    followed = place_tasks(forward, 2, COSTS, homes=homes)
    assert [task.device for task in followed.tasks] == [*homes.values()]


def test_updates_alone_are_placed() -> None:
    graph = layers(4)
    updates = graph.with_tasks([task for task in graph.tasks if task.phase == "update"])
    states = [replace(buffer, role=Role.STATE) for buffer in updates.buffers]
    placed = place_tasks(replace(updates, buffers=tuple(states)), 2, COSTS, homes={"w3": 1})
    assert placed.tasks[3].device == 1


def test_a_step_that_is_placed_again_keeps_its_micro_batches() -> None:
    graph = layers(8)
    _, once = list_device_orders(place_tasks(graph, 2, COSTS), COSTS, {})[-1]
    _, again = list_device_orders(place_tasks(once.on_one_device(), 4, COSTS), COSTS, {})[-1]
    assert len(again.tasks) == len(graph.tasks)
    assert {task.turn for task in again.tasks} == {task.turn for task in once.tasks}
