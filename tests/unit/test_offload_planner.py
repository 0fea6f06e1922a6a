"""The planner on graphs that are made by hand: who goes, who stays, what is refused."""

from dataclasses import replace
from typing import Any

import pytest
from support.hand_made_plans import UNIT, copies, planned, training, uses

from offload.errors import BudgetTooSmall
from offload.graph.builder import GraphBuilder
from offload.graph.memgraph import OFFLOAD, RELOAD, TASK, MemGraph
from offload.graph.taskgraph import HOST
from offload.planning.planner import Policy, build_memgraph
from offload.planning.refusal import smallest_budget
from offload.planning.residency import most_resident
from offload.planning.verify import verify

# ---- whom ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "gone"),
    [("dabc", ["c"]), ("dbca", ["a"]), ("dcab", ["b"]), ("dcba", ["a"]), ("dacb", ["b"])],
)
def test_the_one_whose_next_use_is_furthest_goes(order: str, gone: list[str]) -> None:
    """Belady's choice: three places, and the fourth tensor comes while the others wait."""
    memgraph = planned(uses(order), 3)
    assert copies(memgraph, OFFLOAD) == gone
    assert copies(memgraph, RELOAD) == gone


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


def test_free_bytes_beside_a_victim_are_used_before_another_victim_goes() -> None:
    builder = GraphBuilder()
    buffers = {n: builder.buffer(n, UNIT, "activation") for n in "abcd"}
    for n in "abcd":
        builder.task(f"make {n}", writes=[buffers[n]])
    builder.task("last of c", [buffers["c"]])
    big = builder.buffer("big", 2 * UNIT, "activation")
    builder.task("make big", writes=[big])
    builder.task("read big", [big])
    for n in "abd":
        builder.task(f"read {n}", [buffers[n]])
    graph = builder.graph()
    memgraph = planned(graph, 4, Policy(ahead=0))
    assert len(copies(memgraph, OFFLOAD)) == 1


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
    resident = most_resident(graph, {0: room})
    assert resident
    units = (least + room) // UNIT + 1
    memgraph = planned(graph, units, Policy(resident, ahead))
    assert resident.isdisjoint(node.buffer for node in memgraph.nodes if node.kind != TASK)
    for b in resident:
        places = {a.place for node in memgraph.nodes for a in node.accesses if a.buffer == b}
        assert places == {memgraph.starts[b]}
        assert memgraph.starts[b].arena == 0


def test_an_output_is_where_the_plan_says_at_the_end() -> None:
    graph = replace(uses("abcd"), outputs=(0, 1, 2, 3))
    for units in (2, 3, 4):
        memgraph = planned(graph, units)
        assert set(memgraph.ends) == {0, 1, 2, 3}
        on_device = [p for p in memgraph.ends.values() if p.arena == 0]
        assert len({p.offset for p in on_device}) == len(on_device) <= units
        ends = {b.place for b in memgraph.blocks if b.to_end}
        assert set(memgraph.ends.values()) <= ends


def test_a_tensor_without_a_user_has_a_home_if_it_is_returned() -> None:
    builder = GraphBuilder()
    w = builder.buffer("w", UNIT, "parameter")
    builder.buffer("unused", UNIT, "parameter")
    builder.output(w)
    graph = builder.graph()
    memgraph = planned(graph, 1)
    assert set(memgraph.starts) == {w} == set(memgraph.ends)


def test_homes_are_kept_wherever_they_are() -> None:
    graph = training(4)
    first = planned(graph, 40, Policy(frozenset({1, 2, 5})))
    homes = {b: place for b, place in first.starts.items() if graph.buffers[b].persistent}
    assert {place.arena for place in homes.values()} == {0, HOST}
    again = build_memgraph(graph, {0: 40 * UNIT}, Policy(), homes=homes)
    verify(again)
    assert {b: again.starts[b] for b in homes} == homes


def test_a_home_beyond_the_arena_is_refused_with_its_end() -> None:
    graph = training(4)
    first = planned(graph, 40, Policy(frozenset({1, 2, 5})))
    homes = {b: place for b, place in first.starts.items() if graph.buffers[b].persistent}
    end = max(place.offset + place.nbytes for place in homes.values() if place.arena == 0)
    with pytest.raises(BudgetTooSmall, match="raise the budget") as refused:
        build_memgraph(graph, {0: end - UNIT}, Policy(), homes=homes)
    assert refused.value.needed == end


# ---- refusals -----------------------------------------------------------------------------------


def test_a_budget_that_does_not_hold_the_largest_task_is_refused_with_its_name() -> None:
    graph = training(3)
    nbytes, name = smallest_budget(graph, 0)
    assert nbytes == 16 * UNIT  # an update: weight, state and gradient; or b: three and one made
    planned(graph, 16)
    with pytest.raises(BudgetTooSmall) as refused:
        planned(graph, 15)
    assert (refused.value.needed, refused.value.task) == (nbytes, name)


def test_a_host_that_is_too_small_is_refused_before_anything_runs() -> None:
    graph = training(3)
    endless = planned(graph, 16)
    needed = endless.arenas[HOST] // UNIT
    planned(graph, 16, host=needed)
    with pytest.raises(BudgetTooSmall, match="host_budget") as refused:
        planned(graph, 16, host=needed - 1)
    assert refused.value.needed > (needed - 1) * UNIT
    with pytest.raises(BudgetTooSmall, match="host_budget"):
        planned(graph, 16, host=0)


# ---- the walk -----------------------------------------------------------------------------------


def picture(memgraph: MemGraph) -> Any:
    return (
        memgraph.nodes,
        dict(memgraph.arenas),
        dict(memgraph.starts),
        dict(memgraph.ends),
        memgraph.blocks,
        dict(memgraph.scratch),
    )


@pytest.mark.parametrize("units", [16, 25, 60])
@pytest.mark.parametrize("policy", [Policy(), Policy(ahead=3, evict_ahead=2)])
def test_the_same_graph_and_budget_give_the_same_plan(units: int, policy: Policy) -> None:
    assert picture(planned(training(6), units, policy)) == picture(
        planned(training(6), units, policy)
    )


def test_a_task_gets_its_place_ahead_of_its_turn_while_there_is_room() -> None:
    """A weight's reload waits for nothing where its bytes were never anybody's."""
    graph = training(6)
    roomy = planned(graph, 200, Policy(ahead=64))
    reloads = [node for node in roomy.nodes if node.kind == RELOAD]
    assert all(not node.deps for node in reloads)
    tight = planned(graph, 16, Policy(ahead=64))
    assert any(node.deps for node in tight.nodes if node.kind == RELOAD)


def test_copies_are_planned_at_the_task_that_needs_them_and_never_depend_on_later_nodes() -> None:
    memgraph = planned(training(6), 20)
    for number, node in enumerate(memgraph.nodes):
        assert all(dep < number for dep in node.deps)
        assert list(node.deps) == sorted(set(node.deps))
        assert 0 <= node.task < len(memgraph.graph.tasks)


def test_without_pressure_a_plan_by_time_needs_no_more_than_what_lives_at_once() -> None:
    """Everything of one size: no hole is too small, so none is left."""
    graph = training(10, units=2)
    persistent = frozenset(b for b, buffer in enumerate(graph.buffers) if buffer.persistent)
    peak = max(graph.live_bytes())
    memgraph = planned(graph, peak // UNIT, Policy(persistent, ahead=0))
    assert {node.kind for node in memgraph.nodes} <= {TASK, RELOAD}  # the input comes in
    assert memgraph.arenas[0] <= peak


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
