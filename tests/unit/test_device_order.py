"""In which order several devices begin their tasks, and whose states of the optimizer stay."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from offload.graph.builder import GraphBuilder
from offload.graph.costs import Costs
from offload.graph.taskgraph import Role, TaskGraph
from offload.lowering.device_order import list_device_orders, list_groups, schedule_tasks
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


def order(graph: TaskGraph, limits: Mapping[int, int] | None = None) -> TaskGraph:
    """The order with the smallest groups."""
    return list_device_orders(graph, COSTS, limits or {})[-1][1]


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
    assert most_under_way(order(graph)) <= 2 * devices
    little = dict.fromkeys(range(devices), 3 * SIZE)
    assert most_under_way(order(graph, little)) <= devices


def test_the_order_keeps_what_tasks_need_and_sums_in_turn() -> None:
    graph = pipeline(3, 8)
    ordered = order(graph)
    ordered.check()
    assert sorted(t.name for t in ordered.tasks) == sorted(t.name for t in graph.tasks)
    for n in range(3):
        turns = [t.turn for t in ordered.tasks if t.phase == "backward" and t.device == n]
        assert turns == list(range(8))


def test_a_device_does_not_wait_for_another_that_could_not_begin_yet() -> None:
    """It begins a later micro-batch while an earlier one is elsewhere."""
    names = [task.name for task in order(pipeline(2, 4)).tasks]
    assert names.index("F1.0") < names.index("B0.0")
    assert names.index("B0.1") < names.index("F1.1"), "backward first: it frees what is kept"


def test_states_stay_where_they_fit_those_of_the_last_updates_first() -> None:
    graph = order(pipeline(2, 4))
    others = bytes_beside_states(graph)
    for room, expected in ((0, set[str]()), (2 * SIZE, {"s0"})):
        capacities = {0: int((others[0] + room) / (1 - SPARE)) + 64, 1: others[1]}
        found = {graph.buffers[b].name for b in find_fitting_states(graph, capacities)}
        assert found == expected


def rounds(devices: int, laps: int, turns: int, head: float = 1.0) -> TaskGraph:
    """A chain of layers that is not placed; the last one takes `head` seconds forward."""
    builder = GraphBuilder()
    count = devices * laps
    weights = [builder.buffer(f"w{n}", SIZE, Role.PARAMETER) for n in range(count)]
    sums = [builder.buffer(f"g{n}", SIZE, Role.GRADIENT) for n in range(count)]
    for turn in range(turns):
        x = [builder.buffer(f"x{turn}", 64, Role.INPUT)]
        took = [1.0] * (count - 1) + [head]
        for n in range(count):
            x.append(builder.buffer(f"a{turn}.{n}", SIZE, Role.ACTIVATION))
            builder.task(f"F{turn}.{n}", (x[n], weights[n]), (x[n + 1],), seconds=took[n])
        back = x[-1]
        for n in reversed(range(count)):
            made = builder.buffer(f"d{turn}.{n}", 64)
            reads = (back, x[n], weights[n], *sums[n : n + bool(turn)])
            builder.task(
                f"B{turn}.{n}", reads, (sums[n], made), phase="backward", seconds=2 * took[n]
            )
            back = made
    return builder.graph()


def test_the_micro_batches_of_a_group_go_through_a_chunk_one_after_the_other() -> None:
    placed = place_tasks(rounds(2, 2, 8), 2, COSTS, laps=(2,))
    named = dict(list_device_orders(placed, COSTS, {}))
    assert list(named) == [f"{size} micro-batches go round together" for size in (8, 4, 2)]
    for ordered in named.values():
        ordered.check()
        for layer in range(4):
            sums = [t.turn for t in ordered.tasks if t.name in {f"B{n}.{layer}" for n in range(8)}]
            assert sums == list(range(8))
    first = [task for task in next(iter(named.values())).tasks if task.device == 0]
    forward = [(task.lap, task.turn) for task in first if task.phase == "forward"]
    backward = [(task.lap, task.turn) for task in first if task.phase == "backward"]
    assert forward == [(lap, turn) for lap in (0, 1) for turn in range(8)]
    assert backward == [(lap, turn) for lap in (1, 0) for turn in range(8)]


def test_with_more_laps_devices_wait_less_and_hold_little_more() -> None:
    graph = rounds(4, 2, 16)
    seconds: list[float] = []
    held: list[int] = []
    for laps in (1, 2):
        placed = place_tasks(graph, 4, COSTS, laps=(laps,))
        group = list_groups(placed)[-1]
        seconds.append(max(end for _, end in schedule_tasks(placed, COSTS, group, 2)))
        held.append(max(bytes_beside_states(order(placed)).values()))
    share = 3 * 2 * 16
    assert seconds[0] == pytest.approx(share + 3 * 6, abs=0.1), "three waits for two layers"
    assert seconds[1] < share + 3 * 4, "three waits for one layer"
    assert held[1] < 1.2 * held[0]


@pytest.mark.parametrize("turns, head, laps", [(1, 1.0, 1), (16, 1.0, 4), (16, 4.0, 1)])
def test_as_many_laps_as_are_fastest(turns: int, head: float, laps: int) -> None:
    """One micro-batch gains nothing, and a head of four layers would make a lap wait."""
    placed = place_tasks(rounds(2, 4, turns, head), 2, COSTS)
    assert 1 + max(task.lap for task in placed.tasks) == laps


@pytest.mark.parametrize("laps", [1, 2, 3])
def test_what_a_device_has_too_much_in_a_lap_it_has_less_in_another(laps: int) -> None:
    """A head that cannot be cut makes one chunk long."""
    placed = place_tasks(rounds(4, 6, 2, head=3.0), 4, COSTS, laps=(laps,))
    loads = [sum(t.seconds or 0 for t in placed.tasks if t.device == d) for d in range(4)]
    assert max(loads) <= 1.1 * sum(loads) / 4


@pytest.mark.parametrize("laps", [1, 2, 4])
@pytest.mark.parametrize("longest", [0, 3, 7])
def test_a_layer_that_takes_nearly_all_the_time_has_company_elsewhere(
    laps: int, longest: int
) -> None:
    """A machine with neighbours measures such times, and the budget is of two devices."""
    graph = rounds(2, 4, 2)
    slow = (f"F0.{longest}", f"F1.{longest}")
    tasks = [replace(t, seconds=1e6 if t.name in slow else 1e-3) for t in graph.tasks]
    placed = place_tasks(graph.with_tasks(tasks), 2, COSTS, laps=(laps,))
    assert {task.device for task in placed.tasks} == {0, 1}


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
