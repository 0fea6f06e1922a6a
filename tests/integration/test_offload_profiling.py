"""What a profile finds out about kernels, and what it leaves as it was."""

import time
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.graph_edits import grown

from offload.graph.builder import GraphBuilder
from offload.graph.memgraph import ALIGNMENT
from offload.graph.taskgraph import TaskGraph
from offload.measuring import profiling
from offload.measuring.kept_costs import MeasuredCosts
from offload.measuring.profiling import measured
from offload.memory import cpu_shim as shim
from offload.program.kernels import Call, Calls, Value

aten = torch.ops.aten
PLACED = pytest.mark.skipif(shim.available() is None, reason=shim.why_not() or "there is one")


@pytest.fixture(params=[True, False], ids=["shim", "no shim"])
def placed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Allocations are recorded, or only counted."""
    if not request.param:
        monkeypatch.setattr(profiling, "available_on", lambda device: None)
    elif shim.available() is None:
        pytest.skip(shim.why_not())


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
def test_a_number_is_a_hidden_tensor_and_has_a_place_too() -> None:
    call = Call(aten.mul.Tensor, (floats(0, 5, 5), 0.3), outputs=(floats(1, 5, 5),))
    begun = time.perf_counter()
    [task] = measured(graph_of(call)).tasks
    whole = time.perf_counter() - begun
    hidden = [(a.nbytes, a.offset) for a in task.kernel.allocations if a.output is None]
    assert hidden == [(8, 0), (4, ALIGNMENT)]  # as it is, and as the other's type
    assert task.workspace == 2 * ALIGNMENT
    assert task.unplaced == 100 + 8 + 4
    assert task.seconds is not None and 0 < task.seconds < whole


@PLACED
@pytest.mark.parametrize(
    ("taken", "expected"),
    [
        ((0.0157, 0.0022, 0.003), 0.003),  # the first was delayed
        ((0.001, 0.009, 0.002), 0.002),
        ((0.012, 0.01), 0.01),  # enough seconds for one call
        ((0.6,), 0.6),
    ],
)
def test_a_call_has_the_median_of_three_runs_or_of_fewer_that_take_long(
    taken: tuple[float, ...], expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, waits = [0.0], iter((1.0, *taken))  # the first run shows what the call allocates

    def op(x: torch.Tensor) -> torch.Tensor:
        clock[0] += next(waits)
        return x + 1

    monkeypatch.setattr(profiling, "perf_counter", lambda: clock[0])
    [task] = measured(graph_of(Call(op, (floats(0, 4),), outputs=(floats(1, 4),)))).tasks
    assert task.seconds == pytest.approx(expected)
    assert next(waits, None) is None, "it ran as often as it should"


@PLACED
def test_hidden_memory_that_is_freed_is_used_again() -> None:
    def op(x: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            x = x + x
        return x

    call = Call(op, (floats(0, 1000),), outputs=(floats(1, 1000),))
    [task] = measured(graph_of(call)).tasks
    assert len(task.kernel.allocations) == 10
    assert [a.output for a in task.kernel.allocations] == [None] * 9 + [0]
    assert task.workspace == 2 * 4032  # the one that it reads and the one that it writes


@PLACED
def test_what_lives_at_once_lies_apart() -> None:
    def op(x: torch.Tensor) -> torch.Tensor:
        kept = [torch.empty(n) for n in (10, 300, 20, 200)]
        del kept[1]
        kept.append(torch.empty(100))
        return torch.empty(50)

    call = Call(op, (floats(0, 4),), outputs=(floats(1, 50),))
    [task] = measured(graph_of(call)).tasks
    ten, three, twenty, two, one, out = task.kernel.allocations
    assert out.output == 0 and out.offset is None
    together = [[ten, three, twenty, two], [ten, twenty, two, one]]
    for alive in together:
        spans = sorted((a.offset, a.offset + a.nbytes) for a in alive)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        assert all(begin % ALIGNMENT == 0 for begin, _ in spans)
    assert task.workspace < sum(a.nbytes for a in (ten, three, twenty, two, one))


@PLACED
def test_what_an_op_keeps_for_itself_has_no_place() -> None:
    kept: list[torch.Tensor] = []

    def op(x: torch.Tensor) -> torch.Tensor:
        kept.append(torch.ones(7))
        return x + 1

    call = Call(op, (floats(0, 100),), outputs=(floats(1, 100),))
    [task] = measured(graph_of(call)).tasks
    own = [a for a in task.kernel.allocations if a.nbytes == 28]
    assert [(a.output, a.offset) for a in own] == [(None, None)]
    assert all((tensor == 1).all() for tensor in kept)


@PLACED
def test_several_calls_add_up_in_seconds_and_share_the_workspace() -> None:
    calls = [
        Call(aten.mul.Tensor, (floats(0, 5, 5), 0.3), outputs=(floats(1, 5, 5),)),
        convolution(),
    ]
    alone = measured(graph_of(*calls)).tasks
    builder = grown(graph_of())
    builder.task("both", range(8), range(8), kernel=Calls(tuple(calls)))
    [both] = measured(builder.graph()).tasks
    assert both.workspace == max(task.workspace for task in alone)
    assert both.unplaced == max(task.unplaced for task in alone)
    assert [c.allocations for c in both.kernel.calls] == [t.kernel.allocations for t in alone]


def test_without_a_compiler_hidden_bytes_are_measured_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = convolution(), Call(aten.add_.Tensor, (floats(0, 5), floats(1, 5)))
    recorded = measured(graph_of(*calls))
    monkeypatch.setattr(shim.LIBRARY, "result", lambda: "no C++ compiler was found")
    tasks = measured(graph_of(*calls)).tasks
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
    measured(graph)
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
    graph = measured(graph_of(Call(Moody(), (floats(0, 40),), outputs=(floats(1, 40),)), good))
    bad, fine = graph.tasks
    [note] = graph.notes
    assert note.endswith("Moody: ValueError: all ones")
    assert (bad.seconds, bad.workspace, bad.unplaced) == (None, 192, 192)
    assert bad.kernel.allocations is None
    assert fine.seconds is not None


def test_a_fault_of_the_profiler_is_no_fault_of_the_op(
    placed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: Any) -> None:
        raise KeyError("which buffer")

    monkeypatch.setattr(profiling, "bind_task", wrong)
    with pytest.raises(KeyError, match="which buffer") as found:
        measured(graph_of(Call(aten.relu.default, (floats(0, 5),), outputs=(floats(1, 5),))))
    assert found.value.__notes__ == ["while aten.relu.default was measured"]


class Counted:
    """An op that says that it is like every other of its kind."""

    alike = "counted"

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, x: torch.Tensor) -> None:
        self.runs += 1
        x.add_(x.sqrt())


def test_calls_that_differ_in_their_buffers_alone_are_run_for_one_another() -> None:
    ops = [Counted() for _ in range(4)]
    sizes = (900, 900, 900, 899)
    tasks = measured(
        graph_of(
            *(
                Call(op, (floats(n, size, offset=16 * n),))
                for n, (op, size) in enumerate(zip(ops, sizes, strict=True))
            )
        )
    ).tasks
    assert [op.runs > 0 for op in ops] == [True, False, False, True]
    assert len({task.seconds for task in tasks[:3]}) == 1
    assert [task.unplaced for task in tasks] == [4 * size for size in sizes]


def test_what_was_measured_before_is_not_measured_again() -> None:
    op, known = Counted(), MeasuredCosts()
    graphs = [graph_of(Call(op, (floats(n, 900),))) for n in (1, 2)]
    first = measured(graphs[0], known).tasks[0]
    runs = op.runs
    second = measured(graphs[1], known).tasks[0]
    assert op.runs == runs > 0
    assert (first.seconds, first.unplaced) == (second.seconds, second.unplaced)


def test_a_number_of_another_type_is_another_call() -> None:
    outputs = (floats(1, 5),)
    calls = [Call(aten.mul.Tensor, (floats(0, 5), n), outputs=outputs) for n in (2, 2.0, True)]
    found = [task.unplaced for task in measured(graph_of(*calls)).tasks]
    assert found[2] < found[0] == found[1]  # a truth value takes one byte, the others eight


def test_values_that_share_a_buffer_share_it_while_they_are_measured_too() -> None:
    seen: list[bool] = []

    def op(a: torch.Tensor, b: torch.Tensor) -> None:
        a.fill_(5)
        seen.append(b[0].item() == 5)

    b = Value(0, torch.float32, (5,), (2,), 50)
    measured(graph_of(Call(op, (floats(0, 20, offset=40), b))))
    assert seen and all(seen)


def test_tasks_of_other_kinds_stay_as_they_are() -> None:
    def kernel(reads: Any, writes: Any) -> None:
        raise AssertionError("not to be run")

    builder = grown(graph_of())
    builder.task("by hand", [0], [1], kernel=kernel)
    builder.task("nothing", [0])
    graph = builder.graph()
    assert measured(graph).tasks == graph.tasks
