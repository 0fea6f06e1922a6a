"""A step on several GPUs: the bits of one, whichever stream is late.

Dead memory is NaN. On GPUs kernels add in any order, so models run on fake ones.
"""

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import offload_training as training
from support import stream_graphs as graphs
from support.fake_gpu import host_function, needs_late_streams, only_on_a_fake_gpu
from support.graph_edits import without_edge
from support.live_training import LiveTraining
from support.placed_training import COSTS, PlacingPlanner
from support.products import every_pair, every_value
from support.stream_runs import CUDA, driver, planned, same, smallest

from offload.errors import OffloadError, RaceFound
from offload.lowering.device_placing import place_tasks
from offload.planning.verify import verify
from offload.running.drivers.cuda import Cuda
from offload.running.runner import Runner
from offload.running.stage import Stage

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 4, reason="needs 4 devices: FAKE_CUDA_DEVICES=4"
    ),
]
FAKE_KERNELS = only_on_a_fake_gpu("kernels of a GPU add in any order")


@FAKE_KERNELS
@pytest.mark.parametrize(
    "name, devices, chunks, share, order",
    every_value(
        ["gpt", "resnet18", "llama"], [2, 4], [1, 2], [1.0, 0.4, 0.0], ["priority", "random"]
    ),
)
def test_a_step_on_several_devices_has_the_bits_of_one(
    name: str, devices: int, chunks: int, share: float, order: str
) -> None:
    case = training.trained_once(name, "cuda")
    case.restart()
    how: dict[str, Any] = {"engine": "cuda", "order": order, "seed": devices, "poison": True}
    planner = PlacingPlanner(devices, chunks, share, **how)
    around = case.case.around
    with LiveTraining(
        case.model, case.case.loss, case.optimizer, around=around, planner=planner
    ) as step_of:
        for number, batch in enumerate(case.batches):
            training.rated(case.optimizer, number)
            torch.manual_seed(number)
            (loss,) = step_of(*batch)
            assert torch.equal(loss, case.losses[number]), number
        case.compare()
    case.compare()
    assert planner.last is not None
    assert 2 <= len(planner.last.graph.devices) <= devices
    assert any(node.kind == "send" for node in planner.last.memgraph.nodes)


def placed(devices: int, **shape: Any) -> Any:
    """A chain on several devices."""
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
            late = driver(held, count=devices)
            with Runner(made, "cuda", order, 3, poison=True, driver=late) as runner:
                for step in range(3):
                    x = graphs.batch(graph.buffers[0].nbytes, step)
                    assert same(runner, plainly, graph.program.tensors, x), (shape, step)


def test_every_edge_between_devices_is_needed_a_late_stream_shows_it() -> None:
    graph = placed(2, count=3, wide=2048, thin=512)
    made = planned(graph, smallest(graph))
    nodes, wrong = made.memgraph.nodes, 0
    crossing = [
        (node, dep)
        for node in range(len(nodes))
        for dep in nodes[node].deps
        if "send" in (nodes[node].kind, nodes[dep].kind) and nodes[node].lane != nodes[dep].lane
    ]
    for node, dep in crossing:
        broken = without_edge(made.memgraph, node, dep)
        with pytest.raises(RaceFound):
            verify(broken)
        late = driver(nodes[dep].lane, count=2)
        with Runner(graphs.HandPlan(broken), "cuda", poison=True, driver=late) as runner:
            plainly, tensors = plainly_of(graph), graph.program.tensors
            wrong += not all(
                same(runner, plainly, tensors, graphs.batch(512, step)) for step in range(2)
            )
    assert len(crossing) > 4
    assert wrong > len(crossing) / 2, f"{wrong} of {len(crossing)}"


def test_each_tensor_is_on_the_device_of_its_home_and_comes_back() -> None:
    graph = placed(2)
    tensors = graph.program.tensors
    with Runner(planned(graph), "cuda") as runner:
        runner(graphs.batch())
        assert {tensor.device.index for tensor in tensors.values()} == {0, 1}
        runner.park()
        assert {tensor.device.type for tensor in tensors.values()} == {"cpu"}
        runner(graphs.batch())
        runner.move_to(planned(graph, smallest(graph)))
        assert same(runner, plainly_of(graph), tensors, graphs.batch(seed=2))
    assert {tensor.device for tensor in tensors.values()} == {torch.device("cuda", 0)}


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
    made, gate = Cuda(CUDA, count=2), threading.Event()
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


# ---- what is refused ----------------------------------------------------------------------------


def test_what_several_devices_cannot_do_is_refused_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = placed(2)
    made = planned(graph)
    before = [torch.cuda.memory_allocated(n) for n in range(2)]
    with pytest.raises(OffloadError, match="'cudagraph' runs steps of one device, and this one"):
        Runner(made, "cudagraph")
    with Stage(CUDA) as stage, pytest.raises(ValueError, match="for 2 devices, and the stage has"):
        Runner(made, stage=stage)
    last = replace(graph.program, device=torch.device("cuda", 3))
    with pytest.raises(OffloadError, match="cuda:3 to cuda:4, and this process sees 4"):
        Runner(planned(replace(graph, program=last)), "cuda")
    assert [torch.cuda.memory_allocated(n) for n in range(2)] == before
