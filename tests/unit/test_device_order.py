"""In which order several devices begin their tasks, and whose states of the optimizer stay."""

import pytest

from offload.graph.builder import GraphBuilder
from offload.graph.costs import Costs
from offload.graph.taskgraph import Role, TaskGraph
from offload.lowering.device_order import order_tasks
from offload.lowering.device_placing import place_tasks
from offload.lowering.fitting_states import SPARE, bytes_beside_states, find_fitting_states

COSTS = Costs(d2d=1e12, copy=1e-9)
SIZE = 1 << 20


def pipeline(devices: int, turns: int, seconds: float = 1.0) -> TaskGraph:
    """One layer a device; a backward task takes twice as long as a forward task."""
    builder = GraphBuilder()
    weights = [builder.buffer(f"w{n}", SIZE, Role.PARAMETER) for n in range(devices)]
    states = [builder.buffer(f"s{n}", 2 * SIZE, Role.STATE) for n in range(devices)]
    sums = [builder.buffer(f"g{n}", SIZE, Role.GRADIENT) for n in range(devices)]
    for turn in range(turns):
        x = [builder.buffer(f"x{turn}", 64, Role.INPUT)]
        for n in range(devices):
            x.append(builder.buffer(f"a{turn}.{n}", SIZE, Role.ACTIVATION))
            builder.task(
                f"F{turn}.{n}", (x[n], weights[n]), (x[n + 1],),
                turn=turn, device=n, seconds=seconds,
            )  # fmt: skip
        back = x[-1]
        for n in reversed(range(devices)):
            made = builder.buffer(f"d{turn}.{n}", 64)
            builder.task(
                f"B{turn}.{n}", (back, x[n], weights[n], *(sums[n : n + 1] if turn else ())),
                (sums[n], made), turn=turn, device=n, phase="backward", seconds=2 * seconds,
            )  # fmt: skip
            back = made
    for n in range(devices):
        changed = (weights[n], states[n])
        builder.task(f"U{n}", (*changed, sums[n]), changed, phase="update", device=n, seconds=0.1)
    return builder.graph()


def most_under_way(graph: TaskGraph) -> int:
    """Micro-batches that have begun and not ended, at most."""
    left = {
        turn: sum(t.turn == turn and t.phase != "update" for t in graph.tasks) for turn in range(99)
    }
    begun: set[int] = set()
    most = 0
    for task in graph.tasks:
        if task.phase != "update":
            begun.add(task.turn)
            most = max(most, sum(left[turn] > 0 for turn in begun))
            left[task.turn] -= 1
    return most


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_so_many_micro_batches_are_under_way_as_keep_the_devices_busy(devices: int) -> None:
    graph = pipeline(devices, 20)
    assert most_under_way(order_tasks(graph, COSTS, {})) <= 2 * devices
    little = dict.fromkeys(range(devices), 3 * SIZE)
    assert most_under_way(order_tasks(graph, COSTS, little)) <= devices


def test_the_order_keeps_what_tasks_need_and_sums_in_turn() -> None:
    graph = pipeline(3, 8)
    ordered = order_tasks(graph, COSTS, {})
    ordered.check()
    assert sorted(t.name for t in ordered.tasks) == sorted(t.name for t in graph.tasks)
    for n in range(3):
        turns = [t.turn for t in ordered.tasks if t.phase == "backward" and t.device == n]
        assert turns == list(range(8))


def test_a_device_does_not_wait_for_another_that_could_not_begin_yet() -> None:
    """It begins a later micro-batch while an earlier one is elsewhere."""
    names = [task.name for task in order_tasks(pipeline(2, 4), COSTS, {}).tasks]
    assert names.index("F1.0") < names.index("B0.0")
    assert names.index("B0.1") < names.index("F1.1"), "backward first: it frees what is kept"


def test_states_stay_where_they_fit_those_of_the_last_updates_first() -> None:
    graph = order_tasks(pipeline(2, 4), COSTS, {})
    others = bytes_beside_states(graph)
    for room, expected in ((0, set[str]()), (2 * SIZE, {"s0"})):
        capacities = {0: int((others[0] + room) / (1 - SPARE)) + 64, 1: others[1]}
        found = {graph.buffers[b].name for b in find_fitting_states(graph, capacities)}
        assert found == expected


def test_cuts_make_the_fullest_device_as_light_as_they_can() -> None:
    builder = GraphBuilder()
    seconds = [1.0, 1.0, 3.0, 4.0, 3.0, 4.0, 2.0, 3.0]
    x = builder.buffer("x", 64, Role.INPUT)
    for n, took in enumerate(seconds):
        made = builder.buffer(f"a{n}", 64, Role.ACTIVATION)
        weight = builder.buffer(f"w{n}", SIZE, Role.PARAMETER)
        builder.task(f"f{n}", (x, weight), (made,), seconds=took)
        x = made
    placed = place_tasks(builder.graph(), 3, COSTS)
    loads = [sum(t.seconds or 0 for t in placed.tasks if t.device == d) for d in range(3)]
    assert max(loads) == 9.0, "with each cut where it is nearest to its share, it is 11"
