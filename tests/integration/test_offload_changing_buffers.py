"""Buffers that a step resizes or replaces, and compiled code in it: refused by name, or equal."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao import quantization
from torch.nn import functional

import offload
from offload import CaptureError, Runner
from offload.tracing.capture import capture as capture_by_fakes
from offload.tracing.capture import traced

pytestmark = pytest.mark.filterwarnings("ignore:.*(torch.ao|reduce_range|deprecated)")


def observed() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)).train()
    net.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
    return quantization.prepare_qat(net)


def test_observers_that_grow_at_their_first_call_are_refused_before_it_and_equal_after() -> None:
    models = [observed(), observed()]
    made = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    x, y = torch.randn(4, 8), torch.randn(4, 3)
    line = r"_fused_moving_avg_obs_fq_helper.default: it gives an argument of size \(0,\) the size"
    with pytest.raises(CaptureError, match=line + r" \(6,\).*one eager call before the capture"):
        offload.capture_training_step(models[0], functional.mse_loss, made[0], x, y)
    for model in models:
        model(x)
    graph = offload.capture_training_step(models[0], functional.mse_loss, made[0], x, y)
    with Runner(offload.plan(graph)) as runner:
        for _ in range(3):
            found, *_ = runner(x, y)
            made[1].zero_grad()
            expected = functional.mse_loss(models[1](x), y)
            expected.backward()
            made[1].step()
            assert torch.equal(found, expected)
    for name, value in models[1].state_dict().items():
        assert torch.equal(models[0].state_dict()[name], value), name


class Keeps(nn.Module):
    buffer: torch.Tensor
    other: torch.Tensor

    def __init__(self, change: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.change = change
        self.register_buffer("buffer", torch.zeros(3))
        self.register_buffer("other", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self, x)
        return x + self.other


CHANGES: dict[str, tuple[Callable[[Any, torch.Tensor], Any], str]] = {
    "resized": (lambda m, x: m.buffer.resize_(5), "resize_ changes the size"),
    "resized as": (lambda m, x: m.buffer.resize_as_(x[:2]), "resize_as_ changes the size"),
    "set": (lambda m, x: m.buffer.set_(x), "set_ changes the size"),
    "data": (lambda m, x: setattr(m.buffer, "data", x), "assigns .data"),
    "replaced": (lambda m, x: setattr(m, "buffer", x * 2), "buffer'] keeps a tensor of the step"),
    "replaced by its copy": (
        lambda m, x: m._buffers.update(buffer=nn.Parameter(m.other, False)),
        "buffer'] becomes another tensor in a call",
    ),
}


@pytest.mark.parametrize("how", [*CHANGES])
def test_a_buffer_that_a_step_resizes_or_replaces_is_refused(how: str) -> None:
    change, message = CHANGES[how]
    module = Keeps(change)
    before = module.buffer
    with pytest.raises(CaptureError) as refused:
        traced(module, torch.randn(3))
    assert message in str(refused.value)
    assert module.buffer is before
    assert before.tolist() == [0.0] * 3


def test_a_buffer_that_the_first_call_replaces_for_good_is_replaced() -> None:
    module = Keeps(lambda m, x: setattr(m, "buffer", m.other))
    graph = traced(module, torch.randn(3))
    assert module.buffer is module.other
    assert graph.tasks


def test_a_resize_to_the_size_that_is_there_is_captured() -> None:
    module = Keeps(lambda m, x: torch.add(x, 1, out=m.buffer.resize_(3)))
    with Runner(offload.plan(capture_by_fakes(module.forward, torch.ones(3)))) as runner:
        runner(torch.ones(3))
        assert module.buffer.tolist() == [2.0] * 3


# ---- compiled code -----------------------------------------------------------------------------


@torch.compile(backend="eager")
def activation(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * x.cos()


HELD = {"deep": [[{"inside": activation}]]}


class Compiled(nn.Module):
    def __init__(self, how: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.compiled = nn.Linear(3, 3), nn.Linear(3, 3)
        self.compiled.compile(backend="eager")
        self.how: Any = how
        self.held: Any = torch.compile(torch.tanh, backend="eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how(self, self.linear(x))


@torch.compiler.disable
def _disabled(x: torch.Tensor) -> torch.Tensor:
    return x.tanh()


disabled: Any = _disabled
CALLS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "a global": lambda m, x: activation(x),
    "deep in a global": lambda m, x: HELD["deep"][0][0]["inside"](x),
    "an attribute": lambda m, x: m.held(x),
    "a module in place": lambda m, x: nn.Module.__call__(m.compiled, x),
    "made in the step": lambda m, x: torch.compile(torch.sin, backend="eager")(x),
}


@pytest.mark.parametrize("how", [*CALLS])
def test_a_call_of_compiled_code_is_refused_with_the_line(how: str) -> None:
    module = Compiled(CALLS[how])
    if how != "a module in place":
        module.compiled = nn.Linear(3, 3)
    with pytest.raises(CaptureError, match=r"torch\.compile"):
        capture_by_fakes(module.forward, torch.ones(2, 3))


def test_a_module_that_is_compiled_in_place_is_refused_by_its_path() -> None:
    with pytest.raises(CaptureError, match=r"compiled is compiled by torch\.compile"):
        capture_by_fakes(Compiled(lambda m, x: m.compiled(x)).forward, torch.ones(2, 3))


def test_code_that_nothing_compiles_is_captured() -> None:
    module = Compiled(lambda m, x: disabled(x))
    module.compiled = nn.Linear(3, 3)
    with (
        torch.no_grad(),
        Runner(offload.plan(capture_by_fakes(module.forward, torch.ones(2, 3)))) as r,
    ):
        assert torch.equal(r(torch.ones(2, 3))[0], module(torch.ones(2, 3)))
    module.how = lambda m, x: activation(x)
    with torch.compiler.set_stance("force_eager"):
        assert traced(module.forward, torch.ones(2, 3)).tasks
