"""Engine `cudagraph` on several GPUs: one graph over their streams, and the bits of one device."""

from functools import partial
from typing import Any

import pytest
import torch
from support import offload_lightning as ol
from support import offload_training as training
from support import stream_graphs as graphs
from support import stream_runs
from support.fake_gpu import needs_held_streams, only_on_a_fake_gpu
from support.graph_edits import edges_of_sends, without_edge
from support.placed_training import COSTS, PlacingPlanner, compare_training
from support.products import every_pair, every_value
from support.stream_runs import CUDA, planned, smallest, works

from offload.lowering.device_placing import place_tasks
from offload.running.drivers.cuda_graph import GraphCuda
from offload.running.runner import Runner

pytestmark = pytest.mark.gpu
launches = ol.replayed
driver = partial(stream_runs.driver, kind=GraphCuda)
LARGE = 1 << 20


def placed(devices: int, **shape: Any) -> Any:
    """A chain on several devices."""
    if torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} devices; the fake GPU has FAKE_CUDA_DEVICES")
    count = shape.pop("count", 3 * devices)
    return graphs.bound(place_tasks(graphs.chain(count, **shape), devices, COSTS), CUDA)


@only_on_a_fake_gpu("kernels of a GPU add in any order")
@pytest.mark.parametrize(
    "name, devices, chunks, share",
    every_value(["resnet18", "llama"], [2, 4], [1, 2], [1.0, 0.4, 0.0]),
)
def test_a_captured_step_on_several_devices_has_the_bits_of_one(
    name: str, devices: int, chunks: int, share: float, launches: list[Any]
) -> None:
    placed(devices)
    planner = PlacingPlanner(devices, chunks, share, engine="cudagraph", poison=True)
    compare_training(training.trained_once(name, "cuda"), planner)
    assert launches
    assert planner.last is not None
    assert any(node.kind == "send" for node in planner.last.memgraph.nodes)


@pytest.mark.parametrize(
    "held, devices", every_pair(["", "compute1", "d2d0-1", "h2d1", "d2h"], [2, 4])
)
def test_whatever_stream_of_a_graph_is_late_the_bits_are_those_of_program_order(
    held: str, devices: int, launches: list[Any]
) -> None:
    for shape in ({"thin": 4096}, {"wide": 1 << 16, "thin": 64}, {"host_updates": True}):
        graph = placed(devices, **shape)
        for budget in (None, smallest(graph)):
            launches.clear()
            with Runner(
                planned(graph, budget), "cudagraph", poison=True, driver=driver(held)
            ) as runner:
                for step in range(4):
                    assert works(runner, graph, graph.program.tensors, step), (shape, step)
            assert len(launches) >= 3


@needs_held_streams
def test_every_edge_of_a_graph_between_devices_is_needed(launches: list[Any]) -> None:
    graph = placed(2, count=3, wide=2048, thin=512)
    made = planned(graph, smallest(graph))
    nodes, wrong = made.memgraph.nodes, 0
    crossing = edges_of_sends(made.memgraph)
    for node, dep in crossing:
        broken = graphs.HandPlan(without_edge(made.memgraph, node, dep))
        launches.clear()
        late = driver(nodes[dep].lane)
        with Runner(broken, "cudagraph", poison=True, driver=late) as runner:
            runner(graphs.batch(512))
            wrong += not all(works(runner, graph, graph.program.tensors, step) for step in range(2))
        assert launches
    assert len(crossing) > 4
    assert wrong > len(crossing) / 3, f"{wrong} of {len(crossing)}"


def test_a_captured_step_moves_to_more_devices(launches: list[Any]) -> None:
    graph = placed(2)
    with Runner(planned(graph.on_one_device()), "cudagraph") as runner:
        for plan in (None, planned(graph), planned(graph.on_one_device())):
            if plan is not None:
                runner.move_to(plan)
            launches.clear()
            assert all(works(runner, graph, graph.program.tensors, step) for step in range(3))
            assert launches


def test_what_kernels_allocate_on_any_device_is_the_graphs_own(launches: list[Any]) -> None:
    """A replay writes to it, so it must not be what the caller has got since the capture."""

    def kernel(salt: int) -> graphs.Kernel:
        plainly = graphs.mixed(salt)

        def run(reads: graphs.Bytes, writes: graphs.Bytes) -> None:
            torch.full((LARGE,), salt, dtype=torch.uint8, device=writes[0].device)
            plainly(reads, writes)

        return run

    graph, made = placed(2, kernel=kernel), driver()
    with Runner(planned(graph), "cudagraph", driver=made) as runner:
        for step in range(2):
            assert works(runner, graph, graph.program.tensors, step)
        mine: list[torch.Tensor] = []
        for lane in ("compute", "compute1"):
            with torch.cuda.stream(made.stream(lane)):  # memory is given back to its stream
                mine.append(torch.full((LARGE,), 255, dtype=torch.uint8, device="cuda"))
        made.synchronize()
        launches.clear()
        assert works(runner, graph, graph.program.tensors)
        assert launches
        made.synchronize()
        assert [int(tensor.min()) for tensor in mine] == [255, 255]
