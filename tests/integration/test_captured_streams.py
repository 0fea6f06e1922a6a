"""Engine `cudagraph` where streams are late and steps go wrong: the bits of program order.

Tests that compute run on the CPU's twin, and, marked `gpu`, on a device. A kernel's Python runs
when it is captured, so what goes wrong in a replay is an op of ours that the graph keeps.
"""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from graph_edits import with_task, without_edge
from products import every_pair
from support import stream_graphs as graphs
from torch import nn
from torch.nn import functional

import offload
from benchmarks.twins.twin_graph import GraphTwin
from offload.errors import DeviceLost
from offload.memory.arenas import HostArena
from offload.running.drivers.cuda_graph import GraphCuda
from offload.running.engines.cudagraph import CudaGraph
from offload.running.runner import Runner

HELD = ("", "compute", "h2d", "d2h")
NO_DEVICE = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ("cpu", pytest.param("cuda", marks=(pytest.mark.gpu, NO_DEVICE)))
CYCLES = 200_000
"""0.1 ms of a device."""
Bytes = Sequence[torch.Tensor]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Of captured graphs, from now on."""
    found: list[Any] = []
    launch = CudaGraph._launch

    def launched(self: CudaGraph, graph: Any, *more: Any) -> None:
        found.append(graph)
        launch(self, graph, *more)

    monkeypatch.setattr(CudaGraph, "_launch", launched)
    return found


def driver(device: str, held: str = "", order: str = "priority") -> Any:
    """One of whose streams comes late: in a graph, too."""
    if device == "cpu":
        return GraphTwin((held,) if held else (), order)
    return GraphCuda(torch.device(device), {held: CYCLES} if held else None)


def planned(graph: Any, budget: Any = None) -> Any:
    made = offload.plan(graph, budget, placement="copy", recompute=False)
    made.verify()
    return made


def smallest(graph: Any) -> int:
    """What is needed at least, with what a device's libraries keep."""
    with pytest.raises(offload.BudgetTooSmall) as refused:
        planned(graph, 1)
    return refused.value.needed


def works(runner: Runner, graph: Any, tensors: Any, seed: int = 7) -> bool:
    """The next step is right, from the values that the tensors have now."""
    plainly = graphs.Plainly(graph, {k: v.cpu().clone() for k, v in tensors.items()})
    x = graphs.batch(graph.buffers[0].nbytes, seed)
    [expected] = plainly.step(x)
    [found] = runner(x.to(graph.program.device))
    right = torch.equal(found.cpu(), expected)
    return right and all(torch.equal(tensors[k].cpu(), plainly.held[k]) for k in tensors)


# ---- streams that are late ----------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "held, order, poison", every_pair(HELD, ["priority", "random"], [False, True])
)
def test_whatever_stream_of_a_graph_is_late_the_bits_are_those_of_program_order(
    device: str, held: str, order: str, poison: bool, launches: list[Any]
) -> None:
    for shape in ({"thin": 4096}, {"wide": 1 << 16, "thin": 64}, {"host_updates": True}):
        graph = graphs.bound(graphs.chain(**shape), device)
        tensors = graph.program.tensors
        for budget in (None, smallest(graph)):
            made, late = planned(graph, budget), driver(device, held, order)
            launches.clear()
            with Runner(made, "cudagraph", poison=poison, driver=late) as runner:
                for step in range(4):
                    assert works(runner, graph, tensors, step), (shape, step)
            assert len(launches) >= 3


@pytest.mark.parametrize("device", DEVICES)
def test_every_edge_of_a_graph_is_needed_a_late_stream_shows_it(
    device: str, launches: list[Any]
) -> None:
    """Taken away one by one: many of such graphs come to other bits when the stream that was waited
    for is late. Only what is replayed counts."""
    graph = graphs.bound(graphs.chain(2, wide=2048, thin=512), device)
    tensors = graph.program.tensors
    made = planned(graph, smallest(graph))
    nodes = made.memgraph.nodes
    edges = [(n, d) for n, node in enumerate(nodes) for d in node.deps]
    crossing = [(n, d) for n, d in edges if nodes[n].lane != nodes[d].lane]
    wrong = 0
    for node, dep in crossing:
        broken = graphs.HandPlan(without_edge(made.memgraph, node, dep))
        late = driver(device, nodes[dep].lane)
        launches.clear()
        with Runner(broken, "cudagraph", poison=True, driver=late) as runner:
            runner(graphs.batch(512).to(device))
            wrong += not all(works(runner, graph, tensors, step) for step in range(2))
        assert launches
    assert len(crossing) > 10
    assert wrong > len(crossing) / 3, f"{wrong} of {len(crossing)}"


# ---- exceptions, Ctrl-C, a device that is gone --------------------------------------------------

strikes: list[Callable[[], object]] = []
"""What the op below does when it runs: once."""


@torch.library.custom_op("perfect_tests::strikes", mutates_args=())
def strikes_op(x: torch.Tensor) -> torch.Tensor:
    while strikes:
        strikes.pop()()
    return x.clone()


@strikes_op.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.fixture(autouse=True)
def no_strikes() -> Iterator[None]:
    strikes.clear()
    yield
    strikes.clear()


def striking(task: str, **shape: Any) -> Any:
    """A chain in which one task can go wrong in a replay."""
    graph = graphs.chain(**shape)
    [kernel] = [t.kernel for t in graph.tasks if t.name == task]

    def run(reads: Bytes, writes: Bytes) -> None:
        torch.ops.perfect_tests.strikes(reads[0])
        kernel(reads, writes)

    graph = with_task(graph, task, kernel=run)
    return graph


@pytest.mark.parametrize("hosted", [False, True])
def test_a_device_that_is_lost_in_mid_replay_is_one_clear_error(
    hosted: bool, launches: list[Any]
) -> None:
    graph = graphs.bound(striking("backward1", host_updates=hosted))
    tensors = graph.program.tensors
    twin = GraphTwin()
    runner = Runner(planned(graph, smallest(graph)), "cudagraph", driver=twin)
    assert all(works(runner, graph, tensors, step) for step in range(3))
    launches.clear()
    strikes.append(lambda: twin.lose("an illegal memory access was encountered"))
    with pytest.raises(DeviceLost, match="last checkpoint") as raised:
        runner(graphs.batch())
    assert "illegal memory access" in str(raised.value.__cause__)
    assert launches and not strikes
    with pytest.raises(DeviceLost, match="last checkpoint"):
        runner(graphs.batch())
    runner.close()
    twin.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("perfect-offload")]


@pytest.mark.parametrize("hosted", [False, True])
def test_a_ctrl_c_in_mid_replay_ends_the_step_and_the_next_one_works(
    hosted: bool, launches: list[Any]
) -> None:
    graph = graphs.bound(striking("forward2", host_updates=hosted))
    tensors = graph.program.tensors
    main = threading.main_thread().ident
    assert main is not None
    with Runner(planned(graph, smallest(graph)), "cudagraph", driver=GraphTwin()) as runner:
        assert all(works(runner, graph, tensors, step) for step in range(3))
        for _ in range(5):
            launches.clear()
            strikes.append(lambda: signal.pthread_kill(main, signal.SIGINT))
            with pytest.raises(KeyboardInterrupt) as struck:
                runner(graphs.batch())
            assert launches and not strikes
            if not hosted:  # the graph runs to its end
                assert any("may be half way" in note for note in struck.value.__notes__)
            assert works(runner, graph, tensors)


def test_a_ctrl_c_in_mid_capture_ends_it_and_the_next_step_is_captured(launches: list[Any]) -> None:
    graph = graphs.chain()
    [kernel] = [t.kernel for t in graph.tasks if t.name == "backward1"]
    calls: list[int] = []

    def struck(reads: Bytes, writes: Bytes) -> None:
        calls.append(len(calls))
        if len(calls) == 2:
            raise KeyboardInterrupt
        kernel(reads, writes)

    graph = graphs.bound(with_task(graph, "backward1", kernel=struck))
    tensors = graph.program.tensors
    with Runner(planned(graph, smallest(graph)), "cudagraph", driver=GraphTwin()) as runner:
        runner(graphs.batch())
        before = {k: v.clone() for k, v in tensors.items()}
        with pytest.raises(KeyboardInterrupt):
            runner(graphs.batch())
        assert all(torch.equal(tensors[k], before[k]) for k in tensors)
        plainly = graphs.Plainly(graph, before)
        assert torch.equal(runner(graphs.batch())[0], plainly.step(graphs.batch())[0])
        assert len(launches) == 1
        assert all(torch.equal(tensors[k], plainly.held[k]) for k in tensors)


def test_a_ctrl_c_at_any_moment_of_a_replay_leaves_a_runner_that_works(launches: list[Any]) -> None:
    graph = graphs.bound(graphs.chain(3))
    tensors = graph.program.tensors
    made, struck = planned(graph, smallest(graph)), 0
    with graphs.alarm() as strikes, Runner(made, "cudagraph", driver=GraphTwin()) as runner:
        for _ in range(3):
            runner(graphs.batch())
        for attempt in range(40):
            struck += strikes(1e-6 + 2e-3 * attempt / 40, lambda: runner(graphs.batch()))
            assert torch.is_grad_enabled()
            launches.clear()
            assert works(runner, graph, tensors), f"after {struck} strikes"
            assert launches
    assert struck > 10


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x))


@pytest.mark.parametrize("wrong", ["word", "label"])
def test_bad_input_of_a_captured_step_arrives_as_it_is_and_the_next_batch_trains(
    wrong: str, launches: list[Any]
) -> None:
    torch.manual_seed(1)
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2])
    graph = offload.capture_training_step(model, functional.cross_entropy, optimizer, x, y)
    bad = (x * 10, y) if wrong == "word" else (x, y * 10)
    with Runner(offload.plan(graph), "cudagraph", driver=GraphTwin()) as runner:
        for _ in range(3):
            runner(x, y)
        launches.clear()
        with pytest.raises(IndexError, match="out of") as raised:
            runner(*bad)
        assert len(launches) == 1
        first, second = raised.value.__notes__
        assert first == "in a captured step, which runs as one: engine cuda names the task"
        assert "may be half way" in second
        eager = Words()
        eager.load_state_dict(model.state_dict())
        expected = functional.cross_entropy(eager(x), y)
        expected.backward()
        [loss] = runner(x, y)
        assert torch.equal(loss, expected.detach()) and len(launches) == 2
        for name, parameter in eager.named_parameters():
            assert parameter.grad is not None
            stepped = parameter.detach().add(parameter.grad, alpha=-0.1)
            assert torch.equal(model.state_dict()[name], stepped), name


# ---- memory that a graph cannot copy ------------------------------------------------------------


def test_where_nothing_was_page_locked_the_loop_runs_the_step_and_it_is_said_why(
    launches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostArena, "note", "12 MiB of host memory could not be page-locked")
    graph = graphs.bound(graphs.chain())
    tensors = graph.program.tensors
    made = planned(graph, smallest(graph))
    with (
        pytest.warns(
            RuntimeWarning, match=r"captured: .*only page-locked.*Engine cuda runs"
        ) as told,
        Runner(made, "cudagraph", driver=GraphTwin()) as runner,
    ):
        assert all(works(runner, graph, tensors, step) for step in range(4))
    assert len(told) == 1 and not launches
    assert "could not be page-locked" in made.explain()
    assert "cannot be captured" in made.explain()
