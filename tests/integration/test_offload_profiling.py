"""What a profile finds out about kernels, and what it leaves as it was."""

import pytest
import torch

from offload.graph.builder import GraphBuilder
from offload.graph.taskgraph import TaskGraph
from offload.measuring.kept_costs import MeasuredCosts
from offload.measuring.profiling import measure_tasks
from offload.memory import cpu_shim as shim
from offload.program.kernels import Call, Value

aten = torch.ops.aten
PLACED = pytest.mark.skipif(shim.available() is None, reason=shim.why_not() or "there is one")


def graph_of(*calls: Call) -> TaskGraph:
    """A task a call, over buffers of 4 KiB."""
    builder = GraphBuilder()
    for b in range(8):
        builder.buffer(f"b{b}", 4096, "parameter")
    for number, call in enumerate(calls):
        builder.task(f"t{number}", range(8), range(8), kernel=call)
    return builder.graph()


def floats(b: int, *size: int, offset: int = 0) -> Value:
    stride = tuple(int(torch.tensor(size[n + 1 :]).prod()) for n in range(len(size)))
    return Value(b, torch.float32, size, stride, offset)


def convolution() -> Call:
    args = (floats(0, 2, 4, 8, 8), floats(1, 4, 4, 3, 3), None)
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    return Call(aten.convolution.default, (*args, *rest), outputs=(floats(2, 2, 4, 8, 8),))


@PLACED
def test_hidden_memory_that_is_freed_is_used_again() -> None:
    def op(x: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            x = x + x
        return x

    call = Call(op, (floats(0, 1000),), outputs=(floats(1, 1000),))
    [task] = measure_tasks(graph_of(call)).tasks
    assert len(task.kernel.allocations) == 10
    assert [a.output for a in task.kernel.allocations] == [None] * 9 + [0]
    assert task.workspace == 2 * 4032  # the one that it reads and the one that it writes


def test_without_a_compiler_hidden_bytes_are_measured_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = convolution(), Call(aten.add_.Tensor, (floats(0, 5), floats(1, 5)))
    recorded = measure_tasks(graph_of(*calls))
    monkeypatch.setattr(shim.LIBRARY, "result", lambda: "no C++ compiler was found")
    tasks = measure_tasks(graph_of(*calls)).tasks
    assert [task.workspace for task in tasks] == [0, 0]
    assert tasks[0].unplaced >= 2 * 4 * 8 * 8 * 4
    assert tasks[1].unplaced == 0
    assert [task.kernel.allocations for task in tasks] == [None, None]
    assert all(task.seconds is not None and task.seconds > 0 for task in tasks)
    if recorded.tasks[0].workspace:
        assert [t.unplaced for t in tasks] == [t.unplaced for t in recorded.tasks]


def test_a_profile_changes_neither_the_random_generator_nor_the_given_graph() -> None:
    call = Call(aten.bernoulli_.float, (floats(0, 40, 3), 0.4))
    graph = graph_of(call)
    before = torch.get_rng_state()
    measure_tasks(graph)
    assert torch.equal(torch.get_rng_state(), before)
    assert graph.tasks[0].seconds is None
    assert graph.tasks[0].kernel is call


class Moody:
    """An op of Python that does not like made-up tensors."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if (x == 1).all():
            raise ValueError("all ones\nand more")
        return x * 2


def test_an_op_that_fails_on_made_up_tensors_is_noted_and_charged_for_its_outputs() -> None:
    good = Call(aten.add_.Tensor, (floats(0, 5), floats(1, 5)))
    graph = measure_tasks(graph_of(Call(Moody(), (floats(0, 40),), outputs=(floats(1, 40),)), good))
    bad, fine = graph.tasks
    [note] = graph.notes
    assert note.endswith("Moody: ValueError: all ones")
    assert (bad.seconds, bad.workspace, bad.unplaced) == (None, 192, 192)
    assert bad.kernel.allocations is None
    assert fine.seconds is not None


class Counted:
    """An op that says that it is like every other of its kind."""

    alike = "counted"

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, x: torch.Tensor) -> None:
        self.runs += 1
        x.add_(x.sqrt())


def test_what_was_measured_before_is_not_measured_again() -> None:
    op, known = Counted(), MeasuredCosts()
    graphs = [graph_of(Call(op, (floats(n, 900),))) for n in (1, 2)]
    first = measure_tasks(graphs[0], known).tasks[0]
    runs = op.runs
    second = measure_tasks(graphs[1], known).tasks[0]
    assert op.runs == runs > 0
    assert (first.seconds, first.unplaced) == (second.seconds, second.unplaced)
