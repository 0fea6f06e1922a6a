"""Which updates wait for the next forward pass, and what that saves on paper."""

from dataclasses import replace
from typing import Any

import pytest

import offload
from offload.graph.builder import GraphBuilder
from offload.graph.costs import Costs
from offload.graph.taskgraph import TaskGraph
from offload.lowering.rotation import rotated
from offload.lowering.rotation_choice import late_at, late_choices
from offload.program.kernels import Program

MIB = 1 << 20
LAYERS = 12


def step(update: float, clip: bool = False, lane: str = "host") -> TaskGraph:
    """Forward 12 ms, backward 24 ms; every update takes `update` milliseconds of the host."""
    builder = GraphBuilder()
    x = builder.buffer("x", 4096, "input")
    weights = [builder.buffer(f"w{n}", MIB, "parameter") for n in range(LAYERS)]
    states = [builder.buffer(f"s{n}", 2 * MIB, "state") for n in range(LAYERS)]
    for n, w in enumerate(weights):
        y = builder.buffer(f"y{n}", 4096, "activation")
        builder.task(f"f{n}", [x, w], [y], seconds=1e-3)
        x = y
    gradients = [builder.buffer(f"g{n}", MIB, "gradient") for n in range(LAYERS)]

    def updated(n: int) -> None:
        own = [weights[n], states[n]]
        reads = [*own, gradients[n], *([factor] if clip else [])]
        builder.task(f"u{n}", reads, own, phase="update", seconds=update * 1e-3, lane=lane)

    factor = builder.buffer("factor", 4)
    for n in reversed(range(LAYERS)):
        builder.task(f"b{n}", [x, weights[n]], [gradients[n]], phase="backward", seconds=2e-3)
        if not clip:
            updated(n)
    if clip:
        builder.task("factor", gradients, [factor], phase="update", seconds=1e-4)
        for n in reversed(range(LAYERS)):
            updated(n)
    builder.output(x)
    return builder.graph(Program((), (), {}))


def planned(graph: TaskGraph, late: bool, **more: Any) -> offload.Plan:
    plan = offload.plan(graph, 6 * MIB, placement="copy", late=late, **more)
    plan.verify()
    return plan


def names(graph: TaskGraph, numbers: frozenset[int]) -> list[int]:
    return sorted(int(graph.tasks[number].name[1:]) for number in numbers)


# ---- the choice ----------------------------------------------------------------------------------


def test_what_backward_leaves_over_is_spread_over_the_layers() -> None:
    """By hand: u11 runs from 2 to 5 ms (b10 ends at 4), u10 to 8 (b9, b8), u8 to 11, u7 to 14, u5
    and so on; u1 to 26 begins before backward ends at 24; u0, u2.. are left."""
    graph = step(3.0)
    late = names(graph, late_at(graph, Costs()))
    assert late == [0, 2, 5, 9] or late == [0, 3, 6, 9]


def test_where_the_host_keeps_up_with_backward_only_the_last_gradient_may_be_late() -> None:
    graph = step(1.0)
    assert names(graph, late_at(graph, Costs())) == [0]


def test_behind_a_norm_of_all_gradients_every_update_but_one_is_late() -> None:
    graph = step(1.0, clip=True)
    late = names(graph, late_at(graph, Costs()))
    assert late in ([*range(LAYERS)], [*range(1, LAYERS)])


def test_a_slower_device_leaves_fewer_and_more_workers_too() -> None:
    graph = step(4.0)
    counts = [len(late_at(graph, Costs(), pace)) for pace in (0.5, 1.0, 1.5, 3.0)]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1]
    assert len(late_at(graph, Costs(host_workers=2))) < len(late_at(graph, Costs()))


def test_updates_on_the_device_are_never_late() -> None:
    graph = step(3.0, lane="compute")
    assert list(late_choices(graph, Costs())) == []
    assert planned(graph, late=True).rotation is None


# ---- the plan ------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", [2.5, 3.0, 4.0])
@pytest.mark.parametrize("link", [8e9, 1e9])
def test_late_updates_make_a_step_faster_whose_updates_outlast_backward(
    update: float, link: float
) -> None:
    graph, costs = step(update), Costs(h2d=link, d2h=link)
    plain = planned(graph, late=False, costs=costs)
    late = planned(graph, late=True, costs=costs)
    assert late.rotation is not None and plain.rotation is None
    # Neither the device's nor the host's work alone allows more; the plain step's tail is the
    # updates that backward has no time for.
    alone = max(36e-3, update * LAYERS * 1e-3)
    saved = plain.predicted_seconds - late.predicted_seconds
    assert saved > 0.3 * (plain.predicted_seconds - alone)
    assert late.predicted_seconds < 1.25 * max(alone, late.bound.seconds)
    # No address makes an update wait for another one: what is left to the plain step is its tail.
    assert max(plain.bound.seconds, late.bound.seconds) < 1.1 * alone
    assert plain.predicted_seconds < 1.1 * (14e-3 + update * LAYERS * 1e-3)


@pytest.mark.parametrize("update", [0.5, 2.0])
def test_no_updates_are_late_where_nothing_is_won(update: float) -> None:
    """The host is done with an update before, or when, the next gradient comes."""
    assert planned(step(update), late=True).rotation is None


def test_a_turned_step_is_planned_only_where_it_is_asked_for() -> None:
    assert planned(step(4.0), late=False).rotation is None
    resident = offload.plan(step(4.0, lane="compute"), placement="copy", late=True)
    assert resident.rotation is None


def test_explain_says_how_many_wait_and_what_that_saves() -> None:
    late = planned(step(4.0), late=True, optimizer="host")
    assert late.rotation is not None
    [line] = [line for line in late.explain().splitlines() if "next forward pass does" in line]
    assert line.strip().startswith(f"{late.rotation.late} of them run while"), line
    assert late.found.without_rotation is not None
    assert late.found.without_rotation == pytest.approx(
        planned(step(4.0), late=False).predicted_seconds, rel=0.05
    )
    assert "ms less a step" in line
    plain = planned(step(4.0), late=False, optimizer="host")
    assert "next forward pass" not in plain.explain()


def test_what_waits_is_at_home_on_the_host_between_two_steps() -> None:
    plan = planned(step(4.0), late=True)
    pending = {b for b, x in enumerate(plan.graph.buffers) if x.name.startswith("pending.")}
    assert plan.rotation is not None and len(pending) == plan.rotation.late
    assert {plan.memgraph.starts[b].arena for b in pending} == {-1}
    other = plan.replan(plan.rotation.flush)
    for b in pending:
        assert other.memgraph.starts[b] == plan.memgraph.starts[b]
    assert not any(node.kind != "task" for node in other.memgraph.nodes), "all of it is at home"


def test_a_clipped_gradient_leaves_the_device_before_the_norm_is_known() -> None:
    graph = step(1.0, clip=True)
    rotation = rotated(graph, [n for n, task in enumerate(graph.tasks) if task.name[0] == "u"])
    assert rotation is not None
    carried = {b.name.split(".")[-1] for b in rotation.steady.buffers if "pending" in b.name}
    assert carried == {"factor", *(f"g{n}" for n in range(LAYERS))}
    tail = [task.name for task in rotation.steady.tasks][-1]
    assert tail == "factor"
    assert replace(rotation.first.tasks[-1], after=()) == rotation.steady.tasks[-1]
