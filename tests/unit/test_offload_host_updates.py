"""Updates on the host: which ones, what moves then, and which nodes are a step's tail."""

from typing import Any

import pytest
import torch
from support.graph_edits import with_task
from support.plan_amounts import least, moved

import offload
from offload.errors import GraphError
from offload.graph.builder import GraphBuilder
from offload.graph.costs import Costs
from offload.graph.memgraph import OFFLOAD, RELOAD, TASK, MemGraph
from offload.graph.taskgraph import HOST, Role, TaskGraph
from offload.live.tape_kernel import TapeKernel
from offload.lowering.host_updates import move_updates_to_host, weigh_moves
from offload.planning.host_tails import host_tail, tail_seconds
from offload.planning.simulator import simulate
from offload.plans.plan import Plan, plan
from offload.program.kernels import Call, Value
from offload.sizes import format_size

MIB = 1 << 20


def by_hand(layers: int = 4, gradient: int = MIB) -> TaskGraph:
    """Each layer has a weight of 1 MiB, and a state of twice that, which its update reads."""
    builder = GraphBuilder()
    x = builder.buffer("x", 4096, Role.INPUT)
    weights = [builder.buffer(f"w{n}", MIB, Role.PARAMETER) for n in range(layers)]
    states = [builder.buffer(f"s{n}", 2 * MIB, Role.STATE) for n in range(layers)]
    for n, w in enumerate(weights):
        y = builder.buffer(f"y{n}", 4096, Role.ACTIVATION)
        builder.task(f"f{n}", (x, w), (y,), seconds=1e-4)
        x = y
    for n in reversed(range(layers)):
        g = builder.buffer(f"g{n}", gradient, Role.GRADIENT)
        builder.task(f"b{n}", (x, weights[n]), (g,), phase="backward", seconds=1e-4)
        own = (weights[n], states[n])
        builder.task(f"u{n}", (*own, g), own, phase="update", traffic=7 * MIB)
    builder.output(x)
    return builder.graph()


def lanes(graph: TaskGraph) -> dict[str, str]:
    return {task.name: task.lane for task in graph.tasks}


# ---- the choice ----------------------------------------------------------------------------------


def test_an_update_goes_to_the_host_where_the_link_is_the_slower_way() -> None:
    # 2 MiB less each way (state; state and parameter, but the gradient) against 7 MiB of traffic.
    graph = by_hand()
    link, launch = 1e9, 0.0
    cheap = Costs(h2d=link, d2h=link, host_memory=3.6e9, launch=launch)
    dear = Costs(h2d=link, d2h=link, host_memory=3.4e9, launch=launch)
    moved = lanes(move_updates_to_host(graph, cheap))
    assert [lane for name, lane in moved.items() if name[0] == "u"] == ["host"] * 4
    assert move_updates_to_host(graph, dear) is graph
    more = Costs(h2d=link, d2h=link, host_memory=3.4e9, launch=launch, host_workers=2)
    assert "host" in lanes(move_updates_to_host(graph, more)).values()


def test_the_choice_is_made_update_by_update() -> None:
    graph = with_task(by_hand(), 5, traffic=700 * MIB)
    found = lanes(move_updates_to_host(graph, Costs(host_memory=1e11)))
    assert (found["u3"], found["u2"], found["u1"]) == ("compute", "host", "host")


def test_an_update_on_the_host_saves_the_state_that_is_not_copied_in_and_no_parameter() -> None:
    slow_in = Costs(h2d=1e6, d2h=1e9)
    found = weigh_moves(by_hand(), slow_in)
    assert len(found) == 4
    assert {move.saved for move in found.values()} == {2 * MIB / slow_in.h2d}


def test_all_go_or_none_where_that_is_asked_for_and_nothing_else_does() -> None:
    graph = by_hand()
    before = graph.tasks
    forced = move_updates_to_host(graph, Costs(host_memory=1.0), "host")
    forced.check()
    assert {name for name, lane in lanes(forced).items() if lane == "host"} == {
        "u0", "u1", "u2", "u3",
    }  # fmt: skip
    assert move_updates_to_host(graph, Costs(), "device") is graph
    assert graph.tasks == before, "a pass makes a new graph"
    again = move_updates_to_host(graph, Costs(host_memory=1.0), "host")
    assert again.tasks == forced.tasks


def test_what_is_at_home_on_a_device_is_updated_there() -> None:
    found = lanes(move_updates_to_host(by_hand(), Costs(), "host", fixed={2}))
    assert (found["u1"], found["u0"]) == ("compute", "host")


def test_choices_that_do_not_exist_are_refused() -> None:
    with pytest.raises(
        GraphError, match="choose='cpu' is unknown; choose one of auto, host, device"
    ):
        move_updates_to_host(by_hand(), Costs(), "cpu")
    with pytest.raises(GraphError, match="optimizer='cpu' is unknown"):
        offload.plan(by_hand(), optimizer="cpu")


# ---- the plan ------------------------------------------------------------------------------------


def test_state_never_moves_and_gradients_only_go_out() -> None:
    graph = by_hand()
    plan = offload.plan(graph, least(graph, optimizer="host"), optimizer="host")
    out, back = moved(plan, OFFLOAD), moved(plan, RELOAD)
    assert out[Role.GRADIENT] == 4 * MIB
    assert Role.GRADIENT not in back
    assert not {Role.STATE} & {*out, *back}
    assert Role.PARAMETER not in out, "the host's is the one that changed"
    assert all(plan.memgraph.starts[b].arena == HOST for b in range(1, 9))


def test_an_update_on_the_host_needs_no_room_on_the_device() -> None:
    graph = by_hand()
    assert least(graph, optimizer="device") == 4 * MIB
    assert least(graph, optimizer="host") < 2.1 * MIB
    assert least(graph, optimizer="auto") == least(graph, optimizer="host")
    assert "host" in lanes(offload.plan(graph, 3 * MIB, optimizer="auto").graph).values()
    resident = offload.plan(graph, optimizer="auto").explain()
    assert f"at least    {format_size(least(graph, optimizer='auto'))}" in resident


def test_auto_plans_both_and_keeps_the_faster() -> None:
    graph = by_hand()
    slow_links = Costs(h2d=1e9, d2h=1e9, host_memory=1e11, memory=1e12)
    slow_host = Costs(h2d=1e9, d2h=1e9, host_memory=1e8, memory=1e12)
    for costs, lane in ((slow_links, "host"), (slow_host, "compute")):
        plans = {
            choice: offload.plan(graph, 5 * MIB, costs, optimizer=choice)
            for choice in ("device", "host", "auto")
        }
        assert lanes(plans["auto"].graph)["u0"] == lane
        best = min(plans["device"].predicted_seconds, plans["host"].predicted_seconds)
        assert plans["auto"].predicted_seconds <= best * 1.000001


def test_where_everything_fits_nothing_goes_to_the_host() -> None:
    plan = offload.plan(by_hand(), optimizer="auto")
    assert set(lanes(plan.graph).values()) == {"compute"}
    assert {node.kind for node in plan.memgraph.nodes} <= {TASK, RELOAD}


def test_what_was_measured_on_another_kind_of_device_is_not_believed_of_the_host() -> None:
    """And its kernels are others than the host's: the user is told."""
    gpu = torch.device("cuda", 0)
    update = TapeKernel(torch.add, None, None, None, (), device=gpu, elementwise=True)
    builder = GraphBuilder()
    w, g = (builder.buffer(n, 256, r) for n, r in (("w", Role.PARAMETER), ("g", Role.GRADIENT)))
    values = [Value(b, torch.float32, (64,), (1,)) for b in (w, g)]
    builder.task("b", (w,), (g,), phase="backward")
    own = {"kernel": Call(update, tuple(values)), "seconds": 9.0, "traffic": 768}
    builder.task("u", (w, g), (w,), phase="update", **own)
    graph = builder.graph()
    found = move_updates_to_host(graph, Costs(), "host")
    assert (found.tasks[1].lane, found.tasks[1].seconds) == ("host", None)
    assert found.notes[-1].startswith("host_updates: the last bits differ")


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
