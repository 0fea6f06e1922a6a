"""The planner on graphs that are made by hand: who goes, who stays, what is refused."""

from collections import Counter
from dataclasses import replace

import pytest
from support.counted_calls import calls_of
from support.hand_made_plans import UNIT, copies, planned, training, uses

from offload.errors import BudgetTooSmall
from offload.graph.builder import GraphBuilder
from offload.graph.memgraph import OFFLOAD, RELOAD, TASK, MemGraph
from offload.graph.taskgraph import TaskGraph
from offload.planning.planner import Policy, build_memgraph
from offload.planning.refusal import smallest_budget
from offload.planning.residency import Residency
from offload.planning.verify import verify

# ---- whom ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["abcdabcd", "dcbaabcd", "adbdcdad", "aabbccdd", "dadbdcda"])
@pytest.mark.parametrize("places", [2, 3])
def test_as_much_is_brought_back_as_by_the_best_choice(order: str, places: int) -> None:
    """One tensor is as large as the other: nobody can do with fewer reloads than Belady."""
    asked = "abcd" + order
    there: list[str] = []
    reloads = 0
    for at, name in enumerate(asked):
        there = [n for n in there if n in asked[at:]]  # nobody reads the others again
        if name in there:
            continue
        reloads += at >= 4
        if len(there) == places:
            there.remove(max(there, key=asked[at:].index))
        there.append(name)
    memgraph = planned(uses(order), places, Policy(ahead=0))
    assert len(copies(memgraph, RELOAD)) == reloads


def test_what_a_placed_task_of_the_host_reads_is_kept_on_another_device() -> None:
    """Though the next task that touches it there overwrites it."""
    builder = GraphBuilder()
    x, y = builder.buffer("x", 64), builder.buffer("y", 64)
    builder.task("makes x", writes=[x], device=1)
    builder.task("waits", after=(0,))
    host = builder.task("on the host", [x], [x], lane="host", after=(1,))
    builder.task("needs room", writes=[y], device=1, after=(host,))
    builder.task("makes x anew", writes=[x], after=(3,))
    memgraph = build_memgraph(builder.graph(), {0: 64, 1: 64}, Policy())
    verify(memgraph)
    assert copies(memgraph, OFFLOAD) == ["x"]


def test_a_window_of_neighbours_goes_for_one_that_is_as_large_as_all_of_them() -> None:
    builder = GraphBuilder()
    small = [builder.buffer(f"s{n}", UNIT, "activation") for n in range(6)]
    for n, b in enumerate(small):
        builder.task(f"make {n}", writes=[b])
    big = builder.buffer("big", 3 * UNIT, "activation")
    builder.task("make big", writes=[big])
    builder.task("read big", [big])
    for n, b in enumerate(small):
        builder.task(f"read {n}", [b])
    graph = builder.graph()
    memgraph = planned(graph, 6, Policy(ahead=0))
    # The last three to be read again lie side by side, and nobody else has to move.
    assert sorted(copies(memgraph, OFFLOAD)) == ["s3", "s4", "s5"]
    assert sorted(copies(memgraph, RELOAD)) == ["s3", "s4", "s5"]


def test_what_a_task_needs_is_laid_side_by_side_where_it_lies_in_its_own_way() -> None:
    """Three units: a and b of one each with a hole between, and c of two that needs b."""
    builder = GraphBuilder()
    a, hole, b = (builder.buffer(n, UNIT, "activation") for n in ("a", "hole", "b"))
    for n, buffer in (("a", a), ("hole", hole), ("b", b)):
        builder.task(f"make {n}", writes=[buffer])
    builder.task("end of the hole", [hole])
    c = builder.buffer("c", UNIT, "activation")
    builder.task("use all", [a, b], [c])
    big = builder.buffer("big", 2 * UNIT, "activation")
    builder.task("make big", [c], [big])
    builder.task("end", [big, c])
    graph = builder.graph()
    memgraph = planned(graph, 3, Policy(ahead=0))
    assert smallest_budget(graph, 0)[0] == 3 * UNIT
    assert [node.task for node in memgraph.nodes if node.kind == TASK] == list(range(7))


# ---- what stays ---------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.3, 0.6, 1.0])
@pytest.mark.parametrize("ahead", [0, 64])
def test_what_is_resident_never_moves(share: float, ahead: int) -> None:
    graph = training(6, units=1024)
    least = smallest_budget(graph, 0)[0]
    room = int(12 * 1024 * UNIT * share)
    resident = Residency(graph).choose({0: room})
    assert resident
    units = (least + room) // UNIT + 1
    memgraph = planned(graph, units, Policy(resident, ahead))
    assert resident.isdisjoint(node.buffer for node in memgraph.nodes if node.kind != TASK)
    for b in resident:
        places = {a.place for node in memgraph.nodes for a in node.accesses if a.buffer == b}
        assert places == {memgraph.starts[b]}
        assert memgraph.starts[b].arena == 0


def test_a_home_beyond_the_arena_is_refused_with_its_end() -> None:
    graph = training(4)
    first = planned(graph, 40, Policy(frozenset({1, 2, 5})))
    homes = {b: place for b, place in first.starts.items() if graph.buffers[b].persistent}
    end = max(place.offset + place.nbytes for place in homes.values() if place.arena == 0)
    with pytest.raises(BudgetTooSmall, match="raise the budget") as refused:
        build_memgraph(graph, {0: end - UNIT}, Policy(), homes=homes)
    assert refused.value.needed == end


# ---- the walk -----------------------------------------------------------------------------------


def test_pieces_of_a_tensor_lie_side_by_side_at_home() -> None:
    builder = GraphBuilder()
    for number in (2, 0, 1):  # in whatever order they were made
        b = builder.buffer(f"piece {number}", 2 * UNIT, "state")
        builder.buffers[b] = replace(builder.buffers[b], tensor="m", start=number * 2 * UNIT)
        builder.buffer(f"between {number}", UNIT, "state")
        builder.task(f"change {number}", [b, b + 1], [b, b + 1])
    graph = builder.graph()
    for policy in (Policy(), Policy(frozenset(range(6)))):
        memgraph = planned(graph, 40, policy)
        homes = sorted(
            (graph.buffers[b].start, place.offset)
            for b, place in memgraph.starts.items()
            if graph.buffers[b].tensor == "m"
        )
        assert len({offset - start for start, offset in homes}) == 1


@pytest.mark.parametrize("units", [16, 24, 40, 200])
def test_what_changed_is_copied_back_once_for_every_time_that_it_leaves(units: int) -> None:
    graph = training(5)
    memgraph = planned(graph, units)
    gone = Counter(copies(memgraph, OFFLOAD))
    for n in range(5):
        # A single task changes each: whatever its comings and goings, one copy holds the change.
        assert gone[f"w{n}"] == gone[f"m{n}"] == 1


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


def calls_to_plan(graph: TaskGraph, units: int) -> int:
    return calls_of(lambda: build_memgraph(graph, {0: units * UNIT}, Policy()))


@pytest.mark.parametrize("units", [16, 80], ids=["least", "some room"])
def test_the_work_of_planning_grows_with_the_number_of_tasks(units: int) -> None:
    small, large = (training(layers) for layers in (60, 480))
    ratio = len(large.tasks) / len(small.tasks)
    assert calls_to_plan(large, units) <= 1.3 * ratio * calls_to_plan(small, units)
