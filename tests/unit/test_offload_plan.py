"""`plan()`: a budget is kept, or refused with the right numbers, and the best try is taken."""

import hashlib
import os
import subprocess
import sys
from typing import Any

import pytest
from support.graph_edits import with_task
from support.plan_amounts import least

import offload
from offload import BudgetTooSmall, Costs, GraphBuilder, GraphError, Plan, TaskGraph
from offload.graph.memgraph import OFFLOAD, RELOAD
from offload.memory import cpu_shim as shim
from offload.planning.refusal import smallest_budget

KIB = 1024


def training(layers: int = 8, activation: int = 48 * KIB, weight: int = 160 * KIB) -> TaskGraph:
    """Layers of several sizes, forward, backward and updated, as a training step does."""
    builder = GraphBuilder()
    made = [builder.buffer("x", 8 * KIB, "input")]
    kinds: list[tuple[int, int]] = []
    for n in range(layers):
        nbytes = weight + (n % 3) * 7 * KIB
        kinds.append(
            (builder.buffer(f"w{n}", nbytes, "parameter"), builder.buffer(f"m{n}", nbytes, "state"))
        )

    def task(name: str, reads: list[int], writes: list[int], phase: str, **more: Any) -> None:
        traffic = sum(builder.buffers[b].nbytes for b in {*reads, *writes})
        builder.task(name, reads, writes, phase=phase, traffic=traffic, **more)

    for n, (w, _) in enumerate(kinds):
        made.append(builder.buffer(f"a{n}", activation + (n % 4) * 5 * KIB, "activation"))
        task(f"f{n}", [made[-2], w], [made[-1]], "forward", flops=1e8, repeatable=True)
    loss = builder.buffer("loss", 4)
    task("loss", [made[-1]], [loss], "forward")
    builder.output(loss)
    g = builder.buffer("g", builder.buffers[made[-1]].nbytes, "gradient")
    task("begin", [loss], [g], "backward")
    for n, (w, m) in reversed(list(enumerate(kinds))):
        d = builder.buffer(f"d{n}", builder.buffers[w].nbytes, "gradient")
        task(f"b{n}", [g, made[n]], [d], "backward", flops=1e8, workspace=70 * KIB)
        before, g = g, builder.buffer(f"g{n}", builder.buffers[made[n]].nbytes, "gradient")
        task(f"c{n}", [before, w], [g], "backward", flops=1e8)
        task(f"u{n}", [d, w, m], [w, m], "update")
    graph = builder.graph()
    graph.check()
    return graph


def moved(plan: Plan, kind: str) -> int:
    return sum(node.nbytes for node in plan.memgraph.nodes if node.kind == kind)


# ---- the budget ---------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["copy", "shim"])
@pytest.mark.parametrize("share", [1.3, 1.0, 0.8, 0.6, 0.4, 0.3])
def test_no_plan_takes_more_than_its_budget(share: float, placement: str) -> None:
    if placement == "shim" and shim.available() is None:
        pytest.skip("no compiler")
    graph = training()
    budget = int(offload.plan(graph, placement=placement).peak_bytes * share)
    plan = offload.plan(graph, budget, placement=placement)
    assert plan.device_bytes <= budget
    plan.verify()


def test_the_smallest_budget_is_that_of_the_largest_task_and_it_is_enough() -> None:
    graph = training()
    needed = least(graph, placement="copy")
    largest = max(sum(graph.buffers[b].nbytes for b in t.touches) for t in graph.tasks)
    assert largest <= needed <= largest + 64 * 8
    plan = offload.plan(graph, needed, placement="copy")
    plan.verify()
    assert plan.device_bytes <= needed
    with pytest.raises(BudgetTooSmall):
        offload.plan(graph, needed - 64, placement="copy")


def test_a_refusal_says_how_much_at_which_task_of_which_line_and_what_to_do() -> None:
    graph = training(2)
    worst = smallest_budget(graph, 0)[1]
    graph = with_task(graph, worst, where="model.py:12 in forward")
    with pytest.raises(BudgetTooSmall) as refused:
        offload.plan(graph, "16KiB", placement="copy")
    text = str(refused.value)
    enough = f"raise the budget to {-(-refused.value.needed // KIB)}KiB "
    for said in (worst, "model.py:12 in forward", "16.0 KiB", enough):
        assert said in text
    assert refused.value.task == worst


def test_what_kernels_allocate_by_themselves_is_part_of_the_budget() -> None:
    graph = training(4)
    plain = least(graph, placement="copy")
    graph = with_task(graph, 3, unplaced=100 * KIB)
    assert least(graph, placement="copy") == plain + 100 * KIB
    plan = offload.plan(graph, plain + 100 * KIB, placement="copy")
    assert plan.reserve == 100 * KIB
    assert plan.memgraph.arenas[0] + plan.reserve == plan.device_bytes <= plain + 100 * KIB


@pytest.mark.parametrize("given", ["800KiB", 800 * KIB, {0: "800 KiB"}, "0.78125 MiB"])
def test_a_budget_may_be_bytes_a_size_or_one_for_each_device(given: Any) -> None:
    plan = offload.plan(training(), given, placement="copy")
    assert plan.budget == {0: 800 * KIB}


@pytest.mark.parametrize("given", [{}, {1: "1MiB"}, {0: "1MiB", 1: "1MiB"}])
def test_a_budget_for_other_devices_than_there_are_is_refused(given: Any) -> None:
    with pytest.raises(GraphError, match="the graph has"):
        offload.plan(training(2), given)


def test_an_unknown_placement_is_refused() -> None:
    with pytest.raises(GraphError, match="placement='gpu'"):
        offload.plan(training(2), placement="gpu")


def test_a_graph_that_makes_no_sense_is_refused() -> None:
    builder = GraphBuilder()
    builder.task("read", [builder.buffer("never written", 8)])
    graph = builder.graph()
    with pytest.raises(GraphError, match="never written"):
        offload.plan(graph)


# ---- the host -----------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.9, 0.5, 0.1])
def test_a_host_budget_that_is_too_small_is_refused_with_one_that_is_enough(share: float) -> None:
    graph = training()
    free = offload.plan(graph, "900KiB", placement="copy", recompute=False)
    with pytest.raises(BudgetTooSmall, match="host_budget") as refused:
        least_host = int(free.host_bytes * share * 0.5)
        offload.plan(graph, "900KiB", host_budget=least_host, placement="copy")
    plan = offload.plan(graph, "900KiB", host_budget=refused.value.needed, placement="copy")
    plan.verify()
    assert plan.host_bytes <= refused.value.needed


def test_what_cannot_wait_on_the_host_is_computed_again() -> None:
    graph = training(12, activation=400 * KIB, weight=40 * KIB)
    kept = offload.plan(graph, "3MiB", placement="copy", recompute=False)
    assert kept.host_bytes > 1500 * KIB
    again = offload.plan(graph, "3MiB", host_budget="1500KiB", placement="copy")
    again.verify()
    assert again.host_bytes <= 1500 * KIB
    assert any(task.recomputes for task in again.graph.tasks)
    with pytest.raises(BudgetTooSmall, match=r"host_budget is 1\.5 MiB; raise host_budget to"):
        offload.plan(graph, "3MiB", host_budget="1500KiB", placement="copy", recompute=False)
    with pytest.raises(BudgetTooSmall) as refused:
        offload.plan(graph, "3MiB", host_budget="0.1MiB", placement="copy")
    assert refused.value.on_host and refused.value.needed < 1500 * KIB
    least = offload.plan(graph, "3MiB", host_budget=refused.value.needed, placement="copy")
    assert any(task.recomputes for task in least.graph.tasks)


# ---- the choice ---------------------------------------------------------------------------------


def test_where_everything_fits_nothing_moves_but_the_inputs() -> None:
    graph = training()
    plan = offload.plan(graph, placement="copy")
    assert moved(plan, OFFLOAD) == 0
    assert moved(plan, RELOAD) == 8 * KIB
    starts = plan.memgraph.starts
    assert all(starts[b].arena == 0 for b in starts if graph.buffers[b].persistent)
    assert [t.name for t in plan.graph.tasks] == [t.name for t in graph.tasks]


@pytest.mark.parametrize("layers", [1, 3, 8, 20, 60])
def test_a_step_that_moves_nothing_needs_little_more_than_what_lives_at_once(layers: int) -> None:
    graph = training(layers)
    plan = offload.plan(graph, placement="copy")
    # Places begin at multiples of 64 bytes.
    live = max(graph.live_bytes()) - 70 * KIB  # in copy mode no workspace has a place
    assert plan.device_bytes <= 1.05 * (live + 64 * len(graph.buffers)) + 70 * KIB
    assert plan.device_bytes <= 1.05 * plan.peak_bytes


def test_a_smaller_budget_moves_more_and_is_never_below_the_bound() -> None:
    graph = training(12)
    peak = offload.plan(graph, placement="copy").peak_bytes
    plans = [offload.plan(graph, int(peak * s), placement="copy") for s in (1, 0.8, 0.5, 0.3)]
    bytes_moved = [moved(plan, OFFLOAD) + moved(plan, RELOAD) for plan in plans]
    assert bytes_moved == sorted(bytes_moved)
    for plan in plans:
        assert plan.bound.seconds <= plan.predicted_seconds
        assert plan.resident_seconds <= plan.predicted_seconds * (1 + 1e-9)


def test_the_plan_is_the_fastest_of_those_that_were_tried() -> None:
    plan = offload.plan(training(12), "1MiB", placement="copy")
    seconds = [float(t.split(": ")[1][:-2]) for t in plan.found.tried if t.endswith(" s")]
    assert len(seconds) >= 5
    assert float(f"{plan.predicted_seconds:.3g}") == min(seconds)


def activated(layers: int) -> TaskGraph:
    """Each layer keeps what it made, and a cheap function of that, for the backward pass."""
    builder = GraphBuilder()
    made = [(-1, builder.buffer("x", KIB, "input"))]
    for n in range(layers):
        a, r = (builder.buffer(f"{kind}{n}", 200 * KIB, "activation") for kind in "ar")
        builder.task(f"linear{n}", [made[-1][1]], [a], flops=1e9)
        builder.task(f"relu{n}", [a], [r], flops=1e3, repeatable=True)
        made.append((a, r))
    g = builder.buffer("g", KIB, "gradient")
    builder.task("loss", [made[-1][1]], [g], phase="backward", flops=1e3)
    for n, (a, r) in reversed(list(enumerate(made[1:]))):
        builder.task(f"back{n}", [g, r, a], [g], phase="backward", flops=1e9)
    builder.output(g)
    return builder.graph()


def test_activations_are_computed_again_where_that_is_faster_and_if_it_is_allowed() -> None:
    graph = activated(10)
    snail = Costs(h2d=1e6, d2h=1e6)
    plain = offload.plan(graph, "1100KiB", snail, placement="copy", recompute=False)
    again = offload.plan(graph, "1100KiB", snail, placement="copy")
    assert not any(task.recomputes for task in plain.graph.tasks)
    assert any(task.recomputes for task in again.graph.tasks)
    assert again.predicted_seconds < plain.predicted_seconds
    again.verify()
    fast = Costs(h2d=1e15, d2h=1e15, copy=0.0)
    kept = offload.plan(graph, "1100KiB", fast, placement="copy")
    assert not any(task.recomputes for task in kept.graph.tasks)


# ---- another batch ------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [1.0, 0.5, 0.3])
@pytest.mark.parametrize("activation", [8 * KIB, 30 * KIB, 48 * KIB])
def test_a_plan_for_another_batch_leaves_every_tensor_at_home(
    share: float, activation: int
) -> None:
    graph = training()
    peak = offload.plan(graph, placement="copy").peak_bytes
    plan = offload.plan(graph, int(peak * share), placement="copy")
    other = plan.replan(training(activation=activation))
    other.verify()
    assert other.device_bytes <= int(peak * share)
    for b, place in plan.memgraph.starts.items():
        if plan.graph.buffers[b].persistent:
            assert other.memgraph.starts[b] == place


# ---- the same -----------------------------------------------------------------------------------


def digest(plan: Plan) -> str:
    parts = (
        plan.memgraph.nodes,
        sorted(plan.memgraph.arenas.items()),
        sorted(plan.memgraph.starts.items()),
        plan.memgraph.blocks,
        plan.found.tried,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def test_the_same_graph_gives_the_same_plan_again() -> None:
    first, second = (offload.plan(training(), "900KiB", placement="copy") for _ in range(2))
    assert digest(first) == digest(second)


@pytest.mark.full
def test_the_same_graph_gives_the_same_plan_in_another_process() -> None:
    """Whose sets and dictionaries of strings are in another order."""
    program = (
        "import offload; from unit import test_offload_plan as t;"
        " print(t.digest(offload.plan(t.training(), '900KiB', placement='copy')))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
