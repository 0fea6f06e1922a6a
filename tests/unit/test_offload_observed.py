"""Steps that never ran: the simulator with a machine's true costs writes the traces."""

from dataclasses import replace

import pytest

import offload
from offload import Costs, GraphBuilder, GraphError, Plan, TaskGraph
from offload.graph.memgraph import OFFLOAD, RELOAD, TASK, MemGraph, Node
from offload.graph.taskgraph import Role
from offload.planning.observation import observe
from offload.planning.remake import search_again, take_new
from offload.planning.simulator import simulate
from offload.running.engines.work import LaneRecord, Record
from offload.running.trace import Span, Trace

KIB = 1 << 10
BELIEVED = Costs(flops=1e9, memory=1e9, launch=0, h2d=1e9, d2h=1e9, copy=0)


def network(layers: int = 12, flops: float = 4e5) -> TaskGraph:
    """Activations that are cheap to make again, as large as what comes of them."""
    builder = GraphBuilder()
    x = builder.buffer("x", KIB, "input")
    acts = [x]
    for n in range(layers):
        hidden = builder.buffer(f"h{n}", 256 * KIB, Role.ACTIVATION)
        builder.task(f"f{n}", [acts[-1]], [hidden], flops=flops / 8, repeatable=True)
        acts.append(builder.buffer(f"a{n}", KIB, Role.ACTIVATION))
        builder.task(f"p{n}", [hidden], [acts[-1]], flops=flops)
    back = builder.buffer("g", KIB)
    builder.task("loss", [acts[-1]], [back], flops=1e3, phase="backward")
    for n in reversed(range(layers)):
        hidden = 1 + 2 * n
        made = builder.buffer(f"g{n}", KIB)
        builder.task(f"b{n}", [back, hidden, acts[n]], [made], flops=flops, phase="backward")
        back = made
    builder.output(back)
    return builder.graph()


def trace_of(plan: Plan, true: Costs, factor: float = 1.0) -> Trace:
    """As a machine with these costs would have run it."""
    graph = plan.graph
    graph = graph.with_tasks([replace(task, seconds=None) for task in graph.tasks])
    record = Record()
    lanes: dict[str, LaneRecord] = {}
    for node, name, start, end in simulate(replace(plan.memgraph, graph=graph), true).timeline:
        ran = lanes.setdefault(name, LaneRecord(name))
        ran.nodes.append(node)
        ran.starts.append(5.0 + factor * start)
        ran.ends.append(5.0 + factor * end)
    record.lanes.extend(lanes.values())
    return Trace(plan.memgraph, record)


def planned(recompute: bool = True) -> Plan:
    return offload.plan(network(), 600 * KIB, costs=BELIEVED, placement="copy", recompute=recompute)


@pytest.mark.parametrize("shared", [1.0, 0.6])
def test_with_what_its_steps_took_a_plans_prediction_is_the_measured_step(shared: float) -> None:
    plan = offload.plan(
        network(), 600 * KIB, costs=replace(BELIEVED, shared=shared), placement="copy",
        recompute=False,
    )  # fmt: skip
    true = replace(BELIEVED, flops=3e8, h2d=2e8, d2h=4e8, shared=shared)
    trace = trace_of(plan, true)
    assert plan.predicted_seconds < 0.5 * trace.seconds
    measured = plan.measured([trace])
    assert measured.predicted_seconds == pytest.approx(trace.seconds, rel=0.02)
    assert (measured.costs.h2d, measured.costs.d2h) == pytest.approx((2e8, 4e8), rel=0.02)
    assert measured.measurement is not None
    assert measured.measurement.seconds == pytest.approx(trace.seconds)
    assert "measured costs" in measured.explain()


def test_the_median_step_counts() -> None:
    plan = planned()
    traces = [trace_of(plan, BELIEVED, factor) for factor in (1, 2, 50)]
    measured = plan.measured(traces)
    assert measured.predicted_seconds == pytest.approx(2 * plan.predicted_seconds, rel=0.01)


def test_a_link_that_is_slower_than_believed_has_the_plan_remade() -> None:
    plan = planned()
    assert not any(task.recomputes for task in plan.graph.tasks)
    measured = plan.measured([trace_of(plan, replace(BELIEVED, h2d=5e7, d2h=5e7))])
    plan.remarks.say("said in the first run")
    remade = measured.remade()
    assert remade.memgraph is not measured.memgraph
    assert "said in the first run" in remade.explain()
    assert any(task.recomputes for task in remade.graph.tasks)
    assert remade.predicted_seconds < 0.97 * measured.predicted_seconds
    assert remade.measurement is not None and "remade: " in remade.measurement.decision
    assert "remade: " in remade.explain()
    remade.verify()


def test_a_machine_that_is_slower_in_everything_keeps_its_plan() -> None:
    plan = planned()
    measured = plan.measured([trace_of(plan, BELIEVED, factor=3.0)])
    kept = measured.remade()
    assert kept.memgraph is measured.memgraph
    assert kept.measurement is not None
    assert kept.measurement.decision == "kept: every lane took 3.00x what was expected"


def test_where_nothing_moves_there_is_nothing_to_choose() -> None:
    plan = offload.plan(network(), None, costs=BELIEVED, placement="copy")
    kept = plan.measured([trace_of(plan, replace(BELIEVED, flops=1e7))]).remade()
    assert kept.measurement is not None
    assert kept.measurement.decision == "kept: there was nothing to choose"


def test_steps_of_another_plan_and_broken_ones_do_not_count() -> None:
    plan, other = planned(), planned(recompute=False)
    broken = trace_of(plan, BELIEVED)
    cut = broken._record.lanes[0]
    cut.ends.pop()
    with pytest.raises(GraphError, match="0 of 3 traces are of whole steps of this plan"):
        plan.measured([trace_of(other, BELIEVED), broken, Trace()])


def test_a_plan_is_measured_before_it_is_remade() -> None:
    with pytest.raises(GraphError, match=r"call plan\.measured\(traces\) first"):
        planned().remade()


# ---- what a node took ----------------------------------------------------------------------------


def nodes(*kinds: tuple[str, str, tuple[int, ...]]) -> MemGraph:
    builder = GraphBuilder()
    made = []
    for number, (kind, lane, deps) in enumerate(kinds):
        b = builder.buffer(f"b{number}", 8)
        task = builder.task(f"t{number}", [], [b], lane=lane) if kind == TASK else -1
        made.append(Node(kind, lane, (), deps, task, b, 0 if kind == TASK else 100))
    return MemGraph(builder.graph(), tuple(made), {}, {}, {}, (), {})


def test_what_the_loop_takes_to_choose_a_kernel_is_the_kernels() -> None:
    memgraph = nodes((TASK, "compute", ()), (RELOAD, "h2d", ()), (TASK, "compute", (1,)))
    spans = [Span("compute", 0, 1, 3), Span("h2d", 1, 2, 7, worker=1), Span("compute", 2, 8, 10)]
    seen = observe(memgraph, [spans])
    # The copy could have begun at the step's begin, at 1; the last task when the copy was over.
    assert seen.tasks == {("compute", "t0"): 2, ("compute", "t2"): 3}
    assert seen.copies == {RELOAD: [(100, 6)]}
    assert seen.seconds == 9


def test_copies_count_what_they_would_have_taken_alone() -> None:
    memgraph = nodes((RELOAD, "h2d", ()), (OFFLOAD, "d2h", ()))
    spans = [Span("h2d", 0, 0, 8), Span("d2h", 1, 0, 4, worker=1)]
    seen = observe(memgraph, [spans], shared=0.5)
    assert seen.copies == {RELOAD: [(100, 6)], OFFLOAD: [(100, 2)]}
    assert (seen.costs(BELIEVED).h2d, seen.costs(BELIEVED).d2h) == (100 / 6, 50)


def test_a_copys_fixed_part_is_read_off_small_and_large_ones() -> None:
    memgraph = nodes((RELOAD, "h2d", ()), (RELOAD, "h2d", (0,)))
    large = replace(memgraph.nodes[1], nbytes=1000)
    memgraph = replace(memgraph, nodes=(memgraph.nodes[0], large))
    seen = observe(memgraph, [[Span("h2d", 0, 0, 3), Span("h2d", 1, 3, 15)]])
    assert (seen.costs(BELIEVED).h2d, seen.costs(BELIEVED).copy) == (100, 2)


def test_of_copies_of_one_size_the_fixed_part_is_what_was_believed() -> None:
    memgraph = nodes((RELOAD, "h2d", ()), (RELOAD, "h2d", (0,)))
    seen = observe(memgraph, [[Span("h2d", 0, 0, 5), Span("h2d", 1, 5, 12)]])
    assert seen.costs(replace(BELIEVED, copy=1)).h2d == 20
    less = seen.costs(replace(BELIEVED, copy=100))
    assert (less.h2d, less.copy) == (200 / 7, 2.5)


def test_a_task_that_runs_once_more_takes_what_it_took_before() -> None:
    builder = GraphBuilder()
    a, b = builder.buffer("a", 8), builder.buffer("b", 8)
    builder.task("t0", [], [a])
    builder.task("t0 again", [], [b], recomputes="t0")
    builder.task("t0", [], [a], lane="host", seconds=9.0)
    graph = builder.graph()
    memgraph = nodes((TASK, "compute", ()))
    seen = observe(memgraph, [[Span("compute", 0, 0, 4)]])
    assert [task.seconds for task in seen.on(graph).tasks] == [4, 4, 9]


# ---- keep or remake ------------------------------------------------------------------------------


def test_only_lanes_that_matter_decide_whether_to_search_again() -> None:
    expected = {"compute": 10.0, "h2d": 5.0, "d2h": 0.001}
    assert not search_again(expected, {"compute": 12, "h2d": 6, "d2h": 0.1}, False).yes
    found = search_again(expected, {"compute": 12, "h2d": 8, "d2h": 0.1}, False)
    assert found.yes
    assert found.why == "h2d took 1.60x what was expected, compute 1.20x"
    assert not search_again(expected, {"compute": 12, "h2d": 8}, True).yes


@pytest.mark.parametrize(
    ("new", "yes", "why"),
    [
        (0.96, True, "remade: 960 ms instead of 1e+03 ms"),
        (0.98, False, "kept: the best other plan saves 2.0 %"),
        (1.2, False, "kept: no other plan is faster"),
    ],
)
def test_a_plan_that_saves_next_to_nothing_is_not_worth_moving(
    new: float, yes: bool, why: str
) -> None:
    found = take_new(1.0, new)
    assert (found.yes, found.why) == (yes, why)
