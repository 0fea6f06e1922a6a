"""What a capture refuses because no graph can repeat it, and that nothing of it is left."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.errors import CaptureError

LAYER = nn.Linear(3, 3)
SGD = torch.optim.SGD(LAYER.parameters(), 0.1)
OWN = torch.Generator()
AT_ONCE = "has to run at once"


def backward(x: torch.Tensor) -> torch.Tensor:
    loss = LAYER(x).sum()
    loss.backward()
    return loss.detach()


def caught(x: torch.Tensor) -> torch.Tensor:
    try:
        return x * x.sum().item()
    except CaptureError:
        return x


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "a value": (lambda x: x * x.sum().item(), AT_ONCE),
    "a value of an input": (lambda x: x * x[0].item(), AT_ONCE),
    "a value that is caught": (caught, "caught the error"),
    "a branch": (lambda x: x if x.sum() > 0 else -x, AT_ONCE),
    "a list": (lambda x: x * x.tolist()[0], AT_ONCE),
    "an array": (lambda x: x * float(x.numpy()[0]), AT_ONCE),
    "a list of a weight": (lambda x: x * LAYER.bias.tolist()[0], AT_ONCE),
    "a mask": (lambda x: x[x > 0], AT_ONCE),
    "python's dice": (lambda x: x * random.random(), "something else every time"),
    "a generator": (lambda x: x + torch.randn(3, generator=OWN), AT_ONCE),
    "a state of dice": (lambda x: x + torch.get_rng_state().float().mean(), AT_ONCE),
    "a seed": (lambda x: (torch.manual_seed(0), x + torch.rand(3))[1], AT_ONCE),
    "a gradient that stays": (backward, "leaves a gradient in the .grad"),
    "an update": (lambda x: (backward(x), SGD.step())[0], r"calls SGD.step\(\)"),
    "a sparse result": (lambda x: x.to_sparse(), "sparse|at once"),
}


@pytest.mark.parametrize("how", [*REFUSED])
def test_what_no_graph_can_repeat_is_refused_and_leaves_nothing(how: str) -> None:
    step, message = REFUSED[how]
    torch.manual_seed(11)
    before = [*LAYER.state_dict().values(), torch.get_rng_state(), OWN.get_state()]
    before = [tensor.clone() for tensor in before]
    with pytest.raises(CaptureError, match=message):
        offload.capture(step, torch.ones(3))
    after = [*LAYER.state_dict().values(), torch.get_rng_state(), OWN.get_state()]
    assert all(map(torch.equal, before, after))
    assert all(p.grad is None for p in LAYER.parameters())


def test_an_input_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(CaptureError, match="input 1 is a float"):
        offload.capture(lambda x, by: x * by, torch.ones(3), 2.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("of_the_module", [True, False])
def test_another_shape_of_what_outlives_the_step_is_refused(of_the_module: bool) -> None:
    """Every step would turn a square of the module's the other way round."""
    square = torch.arange(9.0).view(3, 3)

    def step(x: torch.Tensor) -> torch.Tensor:
        (square if of_the_module else x).t_()
        return x @ square

    with pytest.raises(CaptureError, match="has to run at once"):
        offload.capture(step, torch.ones(3, 3))
