"""Which nodes are a step's tail: what they touch, what comes after them, how long they take."""

from typing import Any

import pytest

from offload.graph.builder import GraphBuilder
from offload.graph.costs import Costs
from offload.graph.memgraph import MemGraph
from offload.graph.taskgraph import HOST, TaskGraph
from offload.planning.host_tails import host_tail, tail_seconds
from offload.planning.simulator import simulate
from offload.plans.plan import Plan, plan

BIG = 1 << 20


def step(count: int = 4, *, clipped: bool = False, **last: Any) -> TaskGraph:
    """Forward and back through `count` weights, whose updates run on the host. `clipped`: after
    all gradients are there. `last`: what is special about the last update."""
    builder = GraphBuilder()
    x = builder.buffer("x", 64, "input")
    weights = [builder.buffer(f"w{n}", BIG, "parameter") for n in range(count)]
    for n, w in enumerate(weights):
        y = builder.buffer(f"a{n}", 64, "activation")
        builder.task(f"forward{n}", [x, w], [y], seconds=1e-3)
        x = y
    gradients, norms = [], []
    for n, w in reversed(list(enumerate(weights))):
        gradients.append(builder.buffer(f"g{n}", BIG, "gradient"))
        norms.append(builder.buffer(f"n{n}", 64))
        builder.task(f"back{n}", [x, w], [gradients[-1], norms[-1]], phase="backward", seconds=1e-3)
    norm = builder.buffer("norm", 64)
    builder.task("norm", norms, [norm], phase="backward", seconds=1e-3)
    for n, (w, g) in enumerate(zip(reversed(weights), gradients, strict=True)):
        more = last if n == count - 1 else {}
        reads = [w, g, norm] if clipped else [w, g]
        builder.task(f"update{n}", reads, [w], phase="update", lane="host", seconds=1e-2, **more)
    builder.output(norm)
    return builder.graph()


def planned(graph: TaskGraph, **options: Any) -> Plan:
    """With the smallest budget, so that no weight is resident."""
    most = plan(graph, None, Costs(), placement="copy", recompute=False)
    budget = most.smallest_bytes
    return plan(graph, budget, Costs(), placement="copy", recompute=False, **options)


def names(memgraph: MemGraph) -> list[str]:
    return [memgraph.name(node) for node in host_tail(memgraph)]


def test_the_tail_is_what_the_host_does_when_the_device_is_done() -> None:
    """Here update0 is not in it: the last gradient's copy waits for the address that it frees."""
    memgraph = planned(step(clipped=True)).memgraph
    assert names(memgraph) == ["update1", "update2", "update3"]
    [copy] = [n for n, _ in enumerate(memgraph.nodes) if memgraph.name(n) == "offload g0"]
    assert [memgraph.name(dep) for dep in memgraph.nodes[copy].deps] == ["update0"]


def test_a_plan_for_tails_gives_no_host_address_out_twice_and_leaves_the_device_earlier() -> None:
    usual, early = planned(step(12, clipped=True)), planned(step(12, clipped=True), tails=True)
    assert names(early.memgraph) == [f"update{n}" for n in range(12)]
    assert len(names(usual.memgraph)) < 12
    assert usual.host_bytes < early.host_bytes <= 2 * 12 * BIG + 4096
    late = tail_seconds(usual.memgraph, usual.simulation.timeline)
    assert tail_seconds(early.memgraph, early.simulation.timeline) > late
    again = early.replan(step(12, clipped=True))
    assert again.tails and names(again.memgraph) == names(early.memgraph)


def test_whatever_comes_after_a_node_of_the_tail_is_in_the_tail_too() -> None:
    """An address of the host that an update frees, and a copy then takes, is such a case."""
    found = 0
    for clipped in (False, True):
        memgraph = planned(step(12, clipped=clipped)).memgraph
        tail = set(host_tail(memgraph))
        found += len(tail)
        for number, node in enumerate(memgraph.nodes):
            if tail.intersection(node.deps):
                assert number in tail
            if number in tail:
                assert {access.place.arena for access in node.accesses} == {HOST}
        waiting = {dep for node in memgraph.nodes for dep in node.deps}
        hosted = {n for n, node in enumerate(memgraph.nodes) if node.lane == "host"}
        assert hosted - waiting <= tail
    assert found >= 13


def test_a_step_without_work_on_the_host_has_no_tail() -> None:
    graph = step()
    tasks = [task for task in graph.tasks if task.lane != "host"]
    assert host_tail(planned(graph.with_tasks(tasks)).memgraph) == ()


def test_a_task_that_draws_is_in_no_tail() -> None:
    """Whoever has the device next has other dice."""
    graph = step(clipped=True, random=True)
    assert names(planned(graph).memgraph) == ["update1", "update2"]


def test_what_writes_an_output_is_in_no_tail() -> None:
    """Outputs are read when the device is handed on."""
    graph = step(clipped=True)
    last = graph.tasks[-1]
    told = TaskGraph(graph.buffers, graph.tasks, (*graph.outputs, last.writes[0]))
    assert names(planned(told).memgraph) == ["update1", "update2"]


def test_the_seconds_of_a_tail_are_those_after_the_last_node_of_a_device() -> None:
    made = planned(step(clipped=True))
    seconds = tail_seconds(made.memgraph, made.simulation.timeline)
    # Three updates of 10 ms on one worker; the first one begins while a gradient is on its way.
    assert 0.029 < seconds <= 0.03
    none = planned(step().with_tasks([t for t in step().tasks if t.lane != "host"]))
    assert tail_seconds(none.memgraph, none.simulation.timeline) == pytest.approx(0.0)
    slow = simulate(made, Costs(host_workers=4))
    assert tail_seconds(made.memgraph, slow.timeline) < seconds
