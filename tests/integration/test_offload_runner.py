"""A runner over hand-made graphs: orders, engines, lanes, devices, what it refuses."""

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from support import offload_hand_made as hand
from support.graph_edits import with_task

from offload.errors import GraphError, OffloadError, StepError
from offload.graph.builder import GraphBuilder
from offload.graph.taskgraph import HOST, TaskGraph
from offload.live.function_capture import capture
from offload.memory import room
from offload.memory.host_memory import HostMemoryLeft
from offload.plans.plan import plan
from offload.running.runner import Runner

ENGINES = ("serial", "threads")
Bytes = Sequence[torch.Tensor]
WAIT = 20.0


def some(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.manual_seed(seed))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("order", ["priority", "random"])
@pytest.mark.parametrize("share", [None, 0.7, 0.0])
def test_every_order_of_a_plan_gives_the_bytes_of_program_order(
    engine: str, order: str, share: float | None
) -> None:
    graph = hand.bind(hand.layers(), [0])
    tensors = graph.program.tensors
    held = {key: tensor.clone() for key, tensor in tensors.items()}
    least = 4 * 640 + 64  # a task's operands, and the scratch
    whole = hand.planned(graph)
    budget = None if share is None else max(least, int(whole.peak_bytes * share))
    with Runner(hand.planned(graph, budget), engine, order, seed=3, poison=True) as runner:
        for step in range(8):
            x = some(640, step)
            [loss] = runner(x)
            [expected] = hand.plainly(graph, [x], held)
            assert torch.equal(loss, expected)
            assert all(torch.equal(tensors[key], held[key]) for key in held)
    assert all(torch.equal(tensors[key], held[key]) for key in held)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_streaming_plans_of_these_tests_do_move_bytes(engine: str) -> None:
    graph = hand.bind(hand.layers(), [0])
    made = hand.planned(graph, 4 * 640 + 64)
    assert {node.kind for node in made.memgraph.nodes} == {"task", "reload", "offload"}
    with Runner(made, engine) as runner:
        runner(some(640))
        assert {"compute", "h2d", "d2h"} <= runner.trace.busy().keys()


@pytest.mark.parametrize("missing", [False, True])
def test_a_missing_edge_is_a_difference_that_poison_shows(missing: bool) -> None:
    """The host task is held back until the compute task has read, if nothing orders them."""
    read = threading.Event()
    builder = GraphBuilder()
    a, b = builder.buffer("a", 64, device=HOST), builder.buffer("b", 64)
    c = builder.buffer("c", 64)

    def write(reads: Bytes, writes: Bytes) -> None:
        assert not missing or read.wait(WAIT)
        writes[0].fill_(7)

    def copy(reads: Bytes, writes: Bytes) -> None:
        writes[0].copy_(reads[0])
        read.set()

    builder.task("write", [], [a], lane="host", device=HOST, kernel=write)
    builder.task("unrelated", [], [b], kernel=lambda reads, writes: writes[0].fill_(1))
    builder.task("read", [b], [c], kernel=copy)
    builder.output(c)
    graph = hand.bind(builder.graph())
    made = hand.planned(graph).memgraph
    # Let `read` read the host task's bytes, and order it after that task, or not.
    node = made.nodes[2]
    there = made.nodes[0].accesses[0]
    seen = replace(node.accesses[0], place=there.place)
    deps = node.deps if missing else (0, *node.deps)
    nodes = (*made.nodes[:2], replace(node, accesses=(seen, node.accesses[1]), deps=deps))
    # For poison, both touch the block.
    blocks = tuple(
        replace(block, nodes=(0, 2)) if block.buffer == a else block for block in made.blocks
    )
    with Runner(
        hand.HandPlan(replace(made, nodes=nodes, blocks=blocks)), "threads", poison=True
    ) as runner:
        [out] = runner()
    assert set(out.tolist()) == ({0xFF} if missing else {7})


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("poison", [False, True])
def test_poison_shows_a_use_after_free(engine: str, poison: bool) -> None:
    builder = GraphBuilder()
    a, b, c = (builder.buffer(name, 64, "activation") for name in "abc")
    builder.task("make", [], [a], kernel=lambda reads, writes: writes[0].fill_(5))
    builder.task("use", [a], [b], kernel=lambda reads, writes: writes[0].copy_(reads[0]))
    builder.task("late", [a, b], [c], kernel=lambda reads, writes: writes[0].copy_(reads[0]))
    builder.output(c)
    graph = hand.bind(builder.graph())
    made = hand.planned(graph).memgraph
    early = tuple(
        replace(block, nodes=(0, 1)) if block.buffer == a else block for block in made.blocks
    )
    with Runner(hand.HandPlan(replace(made, blocks=early)), engine, poison=poison) as runner:
        assert set(runner()[0].tolist()) == ({0xFF} if poison else {5})


@pytest.mark.parametrize("engine", ENGINES)
def test_under_poison_nothing_of_the_step_before_is_found_anywhere(engine: str) -> None:
    builder = GraphBuilder()
    x = builder.buffer("x", 64, "input")
    a, b = builder.buffer("a", 256), builder.buffer("b", 64)
    found: list[set[int]] = []

    def look(reads: Bytes, writes: Bytes) -> None:
        found.append({*writes[0].tolist()})
        writes[0].fill_(1)

    builder.task("make", [x], [a], kernel=look)
    builder.task("use", [a], [b], kernel=look)
    builder.output(b)
    graph = hand.bind(builder.graph(), [0])
    with Runner(hand.planned(graph), engine, poison=True) as runner:
        for _ in range(3):
            runner(some(64))
    assert found == [{0xFF}] * 6


def two_devices() -> TaskGraph:
    """Device 0 and 1 work on their own weights, and hand each other what they made."""
    builder = GraphBuilder()
    x = builder.buffer("x", 320, "input")
    here = builder.buffer("w0", 320, "parameter")
    there = builder.buffer("w1", 320, "parameter", device=1)
    state = builder.buffer("m1", 320, "state", device=HOST)
    last = x
    for n in range(3):
        made = builder.buffer(f"a{n}", 320, "activation")
        moved = builder.buffer(f"moved{n}", 320, "activation", device=1)
        other = builder.buffer(f"b{n}", 320, "activation", device=1)
        back = builder.buffer(f"back{n}", 320, "activation")
        builder.task(f"first{n}", [last, here], [made], kernel=hand.mix(n))
        builder.task(f"send{n}", [made], [moved], lane="d2d", device=0)
        builder.task(f"second{n}", [moved, there], [other, there], device=1, kernel=hand.mix(n))
        builder.task(f"return{n}", [other], [back], lane="d2d", device=1)
        builder.task(f"host{n}", [state], [state], lane="host", device=HOST, kernel=hand.mix(n))
        last = back
    builder.output(last)
    builder.output(state)
    return builder.graph()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("order", ["priority", "random"])
def test_several_devices_and_the_host_work_in_one_graph(engine: str, order: str) -> None:
    graph = hand.bind(two_devices(), [0])
    tensors = graph.program.tensors
    held = {key: tensor.clone() for key, tensor in tensors.items()}
    x = some(320)
    moves = {n for n, task in enumerate(graph.tasks) if task.lane == "d2d"}

    def move(reads: Bytes, writes: Bytes) -> None:
        writes[0].copy_(reads[0])

    spelled = [replace(t, kernel=move) if n in moves else t for n, t in enumerate(graph.tasks)]
    plain = [hand.plainly(graph.with_tasks(spelled), [x], held) for _ in range(3)]
    budget = {0: 1024, 1: 1024}
    made = hand.planned(graph, budget)
    assert {"compute", "compute1", "d2d0-1", "d2d1-0", "host"} <= {
        node.lane for node in made.memgraph.nodes
    }
    with Runner(made, engine, order, poison=True) as runner:
        for expected in plain:
            assert all(map(torch.equal, runner(x), expected))
    assert all(torch.equal(tensors[key], held[key]) for key in held)


def test_the_caller_computes_and_every_other_lane_has_a_thread() -> None:
    names: dict[str, str] = {}
    graph = two_devices()
    for number, task in enumerate(graph.tasks):
        if task.lane != "d2d":

            def kernel(reads: Bytes, writes: Bytes, name: str = task.name) -> None:
                names[name] = threading.current_thread().name
                assert not torch.is_grad_enabled()

            graph = with_task(graph, number, kernel=kernel)
    graph = hand.bind(graph, [0])
    with Runner(hand.planned(graph), "threads") as runner:
        runner(some(320))
        assert threading.current_thread().name == names["first1"]
        assert names["second1"] == "perfect-offload-compute1"
        assert names["host1"] == "perfect-offload-host"
        assert torch.is_grad_enabled()


def test_host_workers_run_at_the_same_time_and_beside_compute() -> None:
    together = threading.Barrier(3)
    builder = GraphBuilder()

    def meet(reads: Bytes, writes: Bytes) -> None:
        together.wait(WAIT)

    for name, lane, device in (("h0", "host", HOST), ("h1", "host", HOST), ("c", "compute", 0)):
        made = builder.buffer(name, 64, device=device)
        builder.task(name, [], [made], lane=lane, device=device, kernel=meet)
        builder.output(made)
    graph = hand.bind(builder.graph())
    with Runner(hand.planned(graph), "threads", host_workers=2) as runner:
        runner()
        assert {span.row for span in runner.trace.spans} == {"compute", "host-0", "host-1"}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_lane_runs_one_node_at_a_time(engine: str) -> None:
    inside = 0
    builder = GraphBuilder()

    def alone(reads: Bytes, writes: Bytes) -> None:
        nonlocal inside
        inside += 1
        writes[0].copy_(torch.arange(1 << 16).to(torch.uint8))  # lets go of the interpreter
        assert inside == 1
        inside -= 1

    for n in range(40):
        made = builder.buffer(f"h{n}", 1 << 16, device=HOST)
        builder.task(f"h{n}", [], [made], lane="host", device=HOST, kernel=alone)
    graph = hand.bind(builder.graph())
    with Runner(hand.planned(graph), engine, "random") as runner:
        runner()


def test_a_step_that_is_added_anew_takes_the_place_of_the_first_one() -> None:
    x = torch.ones(4)
    with Runner(plan(capture(lambda x: (x * 1,), x))) as runner:
        for times in (2, 3):
            runner.add("step", capture(lambda x, by=times: (x * by,), x))
            assert torch.equal(runner.run("step", x)[0], times * x)
        with pytest.raises(StepError, match="no step 'other': add"):
            runner.run("other", x)


def test_arenas_larger_than_the_machine_are_refused_before_anything_moves() -> None:
    graph = hand.bind(hand.layers(1), [0])
    tensors = graph.program.tensors
    made = hand.planned(graph).memgraph
    at = tensors["w0"].data_ptr()
    for arena in (0, HOST):
        huge = replace(made, arenas={**made.arenas, arena: 1 << 50})
        with pytest.raises(OffloadError, match=r"1024\.0 TiB of memory are needed, but only "):
            Runner(hand.HandPlan(huge))
    assert tensors["w0"].data_ptr() == at


def test_memory_that_the_machine_refuses_is_an_error_that_says_how_much_for_what(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A machine with as much memory, of which this process may not have so much.
    monkeypatch.setattr(room, "memory_left", lambda: HostMemoryLeft(1 << 62, "a dream"))
    graph = hand.bind(hand.layers(1), [0])
    tensors = graph.program.tensors
    made = hand.planned(graph).memgraph
    at = tensors["w0"].data_ptr()
    for arena, said in ((0, "device 0.*lower the budget"), (HOST, "the host.*give a host_budget")):
        huge = replace(made, arenas={**made.arenas, arena: 1 << 60})
        with pytest.raises(OffloadError, match=f"{1 << 60} bytes .*{said}"):
            Runner(hand.HandPlan(huge))
    assert tensors["w0"].data_ptr() == at


@pytest.mark.parametrize("wrong", [{"engine": "gpu"}, {"order": "backwards"}])
def test_an_unknown_engine_or_order_is_refused(wrong: dict[str, str]) -> None:
    graph = hand.bind(hand.layers(1), [0])
    with pytest.raises(ValueError, match="one of"):
        Runner(hand.planned(graph), **wrong)  # type: ignore[arg-type]


def test_pieces_that_do_not_lie_side_by_side_are_refused() -> None:
    builder = GraphBuilder()
    for start in (0, 128):
        b = builder.buffer(f"w[{start}]", 64, "parameter")
        builder.buffers[b] = replace(builder.buffers[b], tensor="w", start=start)
        builder.task(f"use{start}", [b], [b], kernel=hand.mix(1))
    graph = hand.bind(builder.graph())
    with pytest.raises(GraphError, match="pieces of tensor w do not lie side by side"):
        Runner(hand.HandPlan(hand.planned(graph).memgraph))


def test_a_task_that_writes_without_a_kernel_is_refused_before_a_step() -> None:
    builder = GraphBuilder()
    builder.task("forgotten", writes=[made := builder.buffer("made", 64)])
    builder.output(made)
    graph = builder.graph()
    with pytest.raises(GraphError, match="forgotten writes buffers but has no kernel"):
        Runner(plan(graph, placement="copy"))


@pytest.mark.parametrize(("share", "beside"), [(None, False), (0.0, True)])
def test_a_step_in_which_nothing_but_inputs_moves_runs_on_the_callers_thread_alone(
    share: float | None, beside: bool
) -> None:
    graph = hand.bind(hand.layers(), [0])
    budget = None if share is None else 4 * 640 + 64
    with Runner(hand.planned(graph, budget), "threads") as runner:
        runner(some(640))
        names = [thread.name for thread in threading.enumerate()]
        assert any(name.startswith("perfect-offload") for name in names) == beside
