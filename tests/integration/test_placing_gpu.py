"""A step on several GPUs: the bits of one, whichever stream is late.

Dead memory is NaN. On GPUs kernels add in any order, so models run on fake ones.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import offload_training as training
from support import stream_graphs as graphs
from support.fake_gpu import host_function, needs_late_streams, only_on_a_fake_gpu
from support.graph_edits import edges_of_sends, without_edge
from support.placed_training import COSTS, PlacingPlanner, compare_training
from support.products import every_pair, every_value
from support.stream_runs import CUDA, driver, planned, same, smallest

from offload.errors import OffloadError, RaceFound
from offload.graph.builder import GraphBuilder
from offload.lowering.device_placing import place_tasks
from offload.planning.verify import verify
from offload.program.generators import default_generator
from offload.program.kernels import Call, Calls, Program, Value
from offload.running.drivers.cuda import Cuda
from offload.running.runner import Runner

pytestmark = pytest.mark.gpu
FIRST = torch.device("cuda", 0)
LATE_SECONDS = 0.05
FAKE_KERNELS = only_on_a_fake_gpu("kernels of a GPU add in any order")


@FAKE_KERNELS
@pytest.mark.parametrize(
    "name, devices, laps, share, order",
    every_value(
        ["gpt", "resnet18", "llama"], [2, 4], [1, 2], [1.0, 0.4, 0.0], ["priority", "random"]
    ),
)
def test_a_step_on_several_devices_has_the_bits_of_one(
    name: str, devices: int, laps: int, share: float, order: str
) -> None:
    need(devices)
    how: dict[str, Any] = {"engine": "cuda", "order": order, "seed": devices, "poison": True}
    planner = PlacingPlanner(devices, laps, share, **how)
    compare_training(training.trained_once(name, "cuda"), planner)
    assert planner.last is not None
    assert 2 <= len(planner.last.graph.devices) <= devices
    assert any(node.kind == "send" for node in planner.last.memgraph.nodes)


def need(devices: int) -> None:
    if torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} devices; the fake GPU has FAKE_CUDA_DEVICES")


def placed(devices: int, **shape: Any) -> Any:
    """A chain on several devices."""
    need(devices)
    count = shape.pop("count", 3 * devices)
    graph = graphs.bound(place_tasks(graphs.chain(count, **shape), devices, COSTS), CUDA)
    assert graph.devices == list(range(devices))
    return graph


def plainly_of(graph: Any) -> graphs.Plainly:
    return graphs.Plainly(graph, {k: v.cpu().clone() for k, v in graph.program.tensors.items()})


@pytest.mark.parametrize(
    "held, devices, order",
    every_pair(["", "compute1", "d2d0-1", "h2d1", "d2h"], [2, 4], ["priority", "random"]),
)
def test_whatever_stream_of_whichever_device_is_late_the_bits_are_those_of_program_order(
    held: str, devices: int, order: str
) -> None:
    for shape in ({"thin": 4096}, {"wide": 1 << 16, "thin": 64}, {"host_updates": True}):
        graph = placed(devices, **shape)
        plainly = plainly_of(graph)
        for budget in (None, smallest(graph)):
            made = planned(graph, budget)
            late = driver(held)
            with Runner(made, "cuda", order, 3, poison=True, driver=late) as runner:
                for step in range(3):
                    x = graphs.batch(graph.buffers[0].nbytes, step)
                    assert same(runner, plainly, graph.program.tensors, x), (shape, step)


def test_every_edge_between_devices_is_needed_a_late_stream_shows_it() -> None:
    graph = placed(2, count=3, wide=2048, thin=512)
    made = planned(graph, smallest(graph))
    nodes, wrong = made.memgraph.nodes, 0
    crossing = edges_of_sends(made.memgraph)
    for node, dep in crossing:
        broken = without_edge(made.memgraph, node, dep)
        with pytest.raises(RaceFound):
            verify(broken)
        late = driver(nodes[dep].lane)
        with Runner(graphs.HandPlan(broken), "cuda", poison=True, driver=late) as runner:
            plainly, tensors = plainly_of(graph), graph.program.tensors
            wrong += not all(
                same(runner, plainly, tensors, graphs.batch(512, step)) for step in range(2)
            )
    assert len(crossing) > 4
    assert wrong > len(crossing) / 2, f"{wrong} of {len(crossing)}"


def test_each_tensor_is_on_the_device_of_its_home_and_comes_back() -> None:
    graph = placed(2)
    alone = graph.with_tasks([replace(task, device=0) for task in graph.tasks])
    tensors = graph.program.tensors
    with Runner(planned(alone), "cuda") as runner:
        runner(graphs.batch())
        runner.move_to(planned(graph))
        runner(graphs.batch())
        assert {tensor.device.index for tensor in tensors.values()} == {0, 1}
        runner.park()
        assert {tensor.device.type for tensor in tensors.values()} == {"cpu"}
        runner(graphs.batch())
        for seed, budget in enumerate((smallest(alone), smallest(graph))):
            which = alone if seed == 0 else graph
            runner.move_to(planned(which, budget))
            assert same(runner, plainly_of(graph), tensors, graphs.batch(seed=seed))
            assert {t.device.index for t in tensors.values()} <= {None, *which.devices}
    assert {tensor.device for tensor in tensors.values()} == {torch.device("cuda", 0)}


@needs_late_streams
def test_what_the_caller_does_on_any_device_comes_after_the_step() -> None:
    need(2)
    made, gate = Cuda(CUDA), threading.Event()
    made.drive(2)
    lanes = [made.stream(lane) for lane in ("compute", "compute1")]
    callers = [torch.cuda.current_stream(number) for number in range(2)]
    for lane in lanes:
        made.begin()
        made.enqueue(lane, lambda: host_function(lambda: gate.wait(60)))
        made.end()
        assert torch.cuda.current_device() == 0
        assert [caller.query() for caller in callers] == [False, False]
        gate.set()
        made.synchronize()
        for caller in callers:
            caller.synchronize()
        gate.clear()


@needs_late_streams
def test_what_leaves_a_device_can_be_read_at_once() -> None:
    graph = placed(2)
    tensors = graph.program.tensors
    with Runner(planned(graph), "cuda") as runner:
        runner(graphs.batch())
        runner.park()  # it takes room on the host, and waits for all devices
        runner(graphs.batch(seed=1))
        there = [key for key, tensor in tensors.items() if tensor.device.index == 1]
        expected = {key: tensors[key].cpu() for key in there}
        with torch.cuda.device(1):
            host_function(lambda: time.sleep(LATE_SECONDS))
        runner.park()
        assert there
        assert all(torch.equal(tensors[key], expected[key]) for key in there)


def test_libraries_take_their_workspaces_on_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "offload.running.stage.warm",
        lambda device: warmed.append((device.index, torch.cuda.current_device())),
    )
    with Runner(planned(placed(2)), "cuda") as runner:
        runner(graphs.batch())
    assert warmed == [(0, 0), (1, 1)]


def test_no_device_has_more_than_its_plan() -> None:
    graph = placed(4, wide=1 << 20)
    made = planned(graph, smallest(graph))
    devices = [torch.device("cuda", number) for number in range(4)]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = [torch.cuda.memory_allocated(device) for device in devices]
    for device in devices:
        torch.cuda.reset_peak_memory_stats(device)
    with Runner(made, "cuda") as runner:
        runner(graphs.batch())
        for number, device in enumerate(devices):
            peak = torch.cuda.max_memory_allocated(device) - before[number]
            arena = made.memgraph.arenas[number]
            assert arena <= peak <= arena + made.reserve, device


def test_times_of_all_devices_are_counted_from_one_moment() -> None:
    graph = placed(2)
    made = planned(graph, smallest(graph))
    with Runner(made, "cuda") as runner:
        runner.measure()
        for _ in range(2):
            runner(graphs.batch())
        trace = runner.trace
    assert trace.timed
    nodes = made.memgraph.nodes
    assert {nodes[span.node].lane for span in trace.spans} >= {"compute", "compute1", "d2d0-1"}
    assert all(span.seconds > 0 for span in trace.spans)
    assert {span.node for span in trace.spans} == set(range(len(nodes)))


# ---- what one device sends another --------------------------------------------------------------


@needs_late_streams
def test_a_send_and_what_its_target_computes_do_not_wait_for_each_other() -> None:
    """torch's own copy between two devices waits for both current streams, and they for it."""
    need(2)
    made, gate = Cuda(CUDA), threading.Event()
    made.drive(2)
    here = torch.arange(64, device="cuda:0")
    there = torch.zeros(64, dtype=here.dtype, device="cuda:1")
    torch.cuda.synchronize(1)
    send, compute = made.stream("d2d0-1"), made.stream("compute1")
    copy = made.copy(there, here)
    try:
        made.enqueue(compute, lambda: host_function(lambda: gate.wait(60)))
        made.enqueue(send, copy)
        send.synchronize()
        assert not compute.query()
        gate.set()
        compute.synchronize()
        assert torch.equal(there.cpu(), here.cpu())
        gate.clear()
        made.enqueue(send, lambda: host_function(lambda: gate.wait(60)))
        made.enqueue(send, copy)
        made.enqueue(compute, lambda: there.add_(0))
        compute.synchronize()
        assert not send.query()
    finally:
        gate.set()
        made.synchronize()
        torch.cuda.set_stream(torch.cuda.default_stream(1))
        torch.cuda.set_stream(torch.cuda.default_stream(0))


# ---- what a step names or draws from, which is the first device's -------------------------------


def on_second(calls: Callable[[Value], Sequence[Call]], **how: Any) -> tuple[torch.Tensor, ...]:
    """What a task on the second device makes, whose step was captured on the first one."""
    need(2)
    builder = GraphBuilder()
    made = Value(builder.buffer("made", 256), torch.float32, (64,), (1,))
    builder.task("make", [], [made.buffer], kernel=Calls(tuple(calls(made))), device=1, **how)
    builder.output(made.buffer)
    program = Program((), (made,), {}, device=FIRST)
    with Runner(planned(replace(builder.graph(), program=program)), "cuda") as runner:
        return (*runner(), *runner())


def test_a_task_makes_tensors_on_its_own_device() -> None:
    seen: list[torch.device] = []

    def ones(size: int, device: torch.device) -> torch.Tensor:
        seen.append(device)
        return torch.ones(size, device=device)

    found = on_second(lambda made: [Call(ones, (64,), {"device": FIRST}, (made,))])
    assert all(bool((each == 1).all()) for each in found)
    assert seen == [torch.device("cuda", 1)] * 2


@FAKE_KERNELS
@pytest.mark.parametrize("whose", ["of the device", "of one's own"])
def test_a_task_draws_what_the_first_device_would_have_drawn(whose: str) -> None:
    need(2)
    first, other = map(default_generator, (FIRST, torch.device("cuda", 1)))
    own = torch.Generator(FIRST) if whose == "of one's own" else first
    given: dict[str, Any] = {"device": FIRST} | ({} if own is first else {"generator": own})
    op = torch.ops.aten.rand.default if own is first else torch.ops.aten.rand.generator
    own.manual_seed(3)
    expected = [torch.rand(64, device=FIRST, generator=own) for _ in range(2)]
    after = own.get_state()
    own.manual_seed(3)
    others = other.get_state()
    found = on_second(lambda made: [Call(op, ([64],), given, (made,))], random=True)
    assert all(map(torch.equal, found, expected))
    assert torch.equal(own.get_state(), after)
    assert torch.equal(other.get_state(), others)


# ---- what is refused ----------------------------------------------------------------------------


def test_fewer_devices_than_the_plan_has_are_refused_before_anything_is_allocated() -> None:
    graph, there = placed(2), torch.cuda.device_count()
    last = replace(graph.program, device=torch.device("cuda", there - 1))
    made = planned(replace(graph, program=last))
    before = [torch.cuda.memory_allocated(n) for n in range(2)]
    with pytest.raises(OffloadError, match=f"to cuda:{there}, and this process sees {there}"):
        Runner(made, "cuda")
    assert [torch.cuda.memory_allocated(n) for n in range(2)] == before
