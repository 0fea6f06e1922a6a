"""The user's tensors while a runner has them: they are its arenas' bytes, and stay the user's."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support.stream_runs import planned
from torch import nn

import offload
from offload.errors import StepError
from offload.graph.builder import GraphBuilder
from offload.graph.taskgraph import TaskGraph
from offload.program.kernels import Call, Program, Value
from offload.running.runner import Runner

ENGINES = ("serial", "threads")
LR = 0.1


@dataclass
class Case:
    """y = x w, then w += LR y^T x and m += 1, over tensors that a test may replace."""

    w: nn.Parameter
    m: torch.Tensor
    graph: TaskGraph
    stride: tuple[int, ...]
    """Of `w` when it was captured: a product in another layout may differ in its last bit."""

    def eagerly(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The output and the values that the next step would leave, by plain torch."""
        with torch.no_grad():
            w = torch.empty_strided(self.w.shape, self.stride).copy_(self.w)
            y = x @ w
            return y, self.w + LR * (x.T @ y), self.m + 1


def value(buffer: int, tensor: torch.Tensor) -> Value:
    return Value(buffer, tensor.dtype, tuple(tensor.shape), tensor.stride())


def add(target: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
    target.add_(LR * (x.T @ y))


def case(
    *, w: nn.Parameter | None = None, rows: int = 4, tensors: Callable[[], Any] | None = None
) -> Case:
    generator = torch.manual_seed(0)
    w = nn.Parameter(torch.randn(5, 5, generator=generator)) if w is None else w
    m, x = torch.zeros(7), torch.zeros(rows, 5)
    builder = GraphBuilder()
    bx = builder.buffer("x", x.nbytes, "input")
    bw = builder.buffer("w", w.untyped_storage().nbytes(), "parameter")
    bm = builder.buffer("m", m.nbytes, "state")
    by = builder.buffer("y", x.nbytes)
    vx, vw, vm, vy = value(bx, x), value(bw, w), value(bm, m), value(by, x)
    vw = replace(vw, offset=w.storage_offset())
    builder.task("mm", [bx, bw], [by], kernel=Call(torch.mm, (vx, vw), outputs=(vy,)))
    builder.task("update", [bx, by, bw], [bw], kernel=Call(add, (vw, vx, vy)), phase="update")
    builder.task("count", [bm], [bm], kernel=Call(torch.Tensor.add_, (vm, 1)), phase="update")
    builder.output(by)
    held = {"w": w, "m": m} if tensors is None else tensors()
    return Case(w, m, builder.graph(Program((vx,), (vy,), held)), w.stride())


def check_step(runner: Runner, made: Case, seed: int = 0) -> None:
    x = torch.randn(4, 5, generator=torch.manual_seed(seed))
    y, w, m = made.eagerly(x)
    assert torch.equal(runner(x)[0], y)
    assert torch.equal(made.w, w) and torch.equal(made.m, m)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("budget", [None, 400])
def test_a_parameter_stays_the_object_that_it_was_and_shows_the_values_of_now(
    engine: str, budget: int | None
) -> None:
    made = case()
    before, seen = made.w.detach().clone(), made.w.data_ptr()
    with Runner(planned(made.graph, budget), engine) as runner:
        assert torch.equal(made.w, before) and made.w.data_ptr() != seen
        at = made.w.data_ptr()
        for step in range(3):
            check_step(runner, made, step)
        assert made.w.data_ptr() == at  # read in place, no copy between two steps
        assert type(made.w) is nn.Parameter and made.w.requires_grad and made.w.is_leaf
    assert made.m.tolist() == [3.0] * 7


def test_values_loaded_in_place_are_what_the_next_step_starts_from() -> None:
    made = case()
    module = nn.Module()
    module.register_parameter("w", made.w)
    saved = {"w": torch.randn(5, 5)}
    with Runner(planned(made.graph, 400), "threads") as runner:
        check_step(runner, made)
        at = made.w.data_ptr()
        module.load_state_dict(saved)
        assert torch.equal(made.w, saved["w"]) and made.w.data_ptr() == at
        check_step(runner, made)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "other",
    [
        lambda: torch.randn(5, 5),
        lambda: torch.randn(5, 5).T,
        lambda: torch.randn(100)[10:35].view(5, 5),
        lambda: torch.randn(1).expand(5, 5),
    ],
    ids=["plain", "transposed", "part of another", "expanded"],
)
def test_a_tensor_that_was_pointed_elsewhere_comes_home_with_its_new_values(
    engine: str, other: Callable[[], torch.Tensor]
) -> None:
    made = case()
    with Runner(planned(made.graph), engine) as runner:
        check_step(runner, made)
        home, new = made.w.data_ptr(), other()
        kept = new.clone()
        made.w.data = new
        with pytest.warns(RuntimeWarning, match=r"w was pointed .* They are apart"):
            check_step(runner, made)
        assert made.w.data_ptr() == home
        assert torch.equal(new, kept)


def test_two_tensors_that_changed_places_come_home_with_each_others_values() -> None:
    builder = GraphBuilder()
    tensors = {name: torch.full((16,), float(n)) for n, name in enumerate("ab")}
    for name, tensor in tensors.items():
        b = builder.buffer(name, tensor.nbytes, "parameter")
        call = Call(torch.Tensor.add_, (value(b, tensor), 10.0))
        builder.task(f"add {name}", [b], [b], kernel=call)
    graph = builder.graph(Program((), (), dict(tensors)))
    with Runner(planned(graph), "serial") as runner:
        runner()
        a, b = tensors["a"], tensors["b"]
        a.data, b.data = b.data, a.data
        runner()
    assert a.tolist() == [21.0] * 16 and b.tolist() == [20.0] * 16


@pytest.mark.parametrize("wrong", [torch.zeros(5, 6), torch.zeros(5, 5, dtype=torch.float64)])
def test_a_tensor_of_another_kind_is_refused_and_a_right_one_runs(wrong: torch.Tensor) -> None:
    made = case()
    with Runner(planned(made.graph), "serial") as runner:
        values = made.w.detach().clone()
        made.w.data = wrong.clone()
        with pytest.raises(StepError, match=r"tensor w is .* Capture it again"):
            runner(torch.ones(4, 5))
        made.w.data = values.clone()
        check_step(runner, made)


@pytest.mark.parametrize("engine", ENGINES)
def test_tensors_that_share_a_storage_still_share_it(engine: str) -> None:
    flat = torch.randn(50)
    w, rest = nn.Parameter(flat[:25].view(5, 5)), flat[25:]
    made = case(w=w, tensors=lambda: {"w": (w, flat, rest), "m": torch.zeros(7)})
    made.m = made.graph.program.tensors["m"]
    with Runner(planned(made.graph), engine) as runner:
        check_step(runner, made)
        assert torch.equal(flat[:25].view(5, 5), w)
        rest.fill_(3.0)
        assert flat[30] == 3.0
        w.data = torch.randn(5, 5)
        with pytest.warns(RuntimeWarning, match=r"w was pointed .* stay with it"):
            check_step(runner, made)
        assert torch.equal(flat[:25].view(5, 5), w)
    flat[0] = 77.0
    assert w[0, 0] == 77.0 and w.untyped_storage().nbytes() == flat.nbytes


def test_a_runner_that_is_dropped_leaves_the_values() -> None:
    made = case()
    runner = Runner(planned(made.graph), "serial")
    check_step(runner, made)
    values = made.w.detach().clone()
    del runner
    gc.collect()
    assert torch.equal(made.w, values)
    with Runner(planned(made.graph), "serial") as runner:
        check_step(runner, made)


@pytest.mark.parametrize("engine", ENGINES)
def test_two_runners_over_the_same_tensors_can_take_turns(engine: str) -> None:
    made = case()
    first = Runner(planned(made.graph), engine)
    second = Runner(planned(made.graph, 400), engine)
    for step, runner in enumerate((first, second, second, first, second, first, first)):
        check_step(runner, made, step)
    second.close()
    check_step(first, made)
    at = made.w.data_ptr()
    second.close()
    assert made.w.data_ptr() == at
    first.close()
    assert made.m.tolist() == [8.0] * 7


def test_a_gradient_from_before_a_step_is_refused_by_autograd() -> None:
    """The step changed what the backward pass would read, as `optimizer.step()` would have."""
    made = case()
    with Runner(planned(made.graph), "serial") as runner:
        loss = (made.w * made.w).sum()
        runner(torch.ones(4, 5))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        (made.w * made.w).sum().backward()
        assert made.w.grad is not None and torch.equal(made.w.grad, 2 * made.w)


@pytest.mark.parametrize("mode", [False, True])
def test_tensors_are_as_much_of_inference_mode_as_they_were(mode: bool) -> None:
    with torch.inference_mode():
        made, table = nn.Linear(4, 4), torch.ones(4)
    net = nn.Linear(4, 4)
    states: list[torch.Tensor] = [made.weight, made.bias, table, net.weight, net.bias]

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            table.add_(1)
            return net(made(x) * table)

    x = torch.ones(2, 4)
    with Runner(offload.plan(offload.capture(step, x))) as runner, torch.inference_mode(mode):
        table.data = torch.full((4,), 2.0)  # a stray, whose value comes home
        found = [runner(x)[0] for _ in range(2)]
        assert table.eq(4).all()
    assert [each.is_inference() for each in states] == [True, True, True, False, False]
    with torch.inference_mode():
        table.fill_(2)
    assert all(torch.equal(step(x), each) for each in found)
