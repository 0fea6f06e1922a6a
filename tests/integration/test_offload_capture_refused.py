"""What a capture refuses because no graph can repeat it, and that nothing of it is left."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import offload
from offload.errors import CaptureError

LAYER = nn.Linear(3, 3)
LAYER.register_buffer("mean", torch.zeros(3))
COUNT = itertools.count()
SGD = torch.optim.SGD(LAYER.parameters(), 0.1)
OWN = torch.Generator()
AT_ONCE = "has to run at once"


def backward(x: torch.Tensor) -> torch.Tensor:
    loss = LAYER(x).sum()
    loss.backward()
    return loss.detach()


def replaced(x: torch.Tensor) -> torch.Tensor:
    LAYER.mean = LAYER.get_buffer("mean") * 0.9 + 0.1 * x
    return x - LAYER.mean


def moved(x: torch.Tensor) -> torch.Tensor:
    LAYER.weight.data = LAYER.weight.data * 2
    return LAYER(x).detach()


def caught(x: torch.Tensor) -> torch.Tensor:
    try:
        return x * x.sum().item()
    except CaptureError:
        return x


def dropped(x: torch.Tensor) -> torch.Tensor:
    """Its backward pass drops the same again, so it sets the generator's state."""
    y = checkpoint(lambda a: functional.dropout(LAYER(a)), x, use_reentrant=False)
    assert isinstance(y, torch.Tensor)
    return torch.autograd.grad(y.sum(), LAYER.weight)[0]


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "a value": (lambda x: x * x.sum().item(), AT_ONCE),
    "a value of an input": (lambda x: x * x[0].item(), AT_ONCE),
    "a value that is caught": (caught, "caught the error"),
    "a branch": (lambda x: x if x.sum() > 0 else -x, AT_ONCE),
    "a list": (lambda x: x * x.tolist()[0], AT_ONCE),
    "an array": (lambda x: x * float(x.numpy()[0]), AT_ONCE),
    "a list of a weight": (lambda x: x * LAYER.bias.tolist()[0], AT_ONCE),
    "a mask": (lambda x: x[x > 0], AT_ONCE),
    "what is there": (lambda x: x.unique(), AT_ONCE),
    "another size": (lambda x: (x * 2).resize_(2), AT_ONCE),
    "dropout that is checkpointed": (dropped, AT_ONCE),
    "zeros without memory": (lambda x: x + torch._efficientzerotensor((3,)).clone(), "no memory"),
    "python's dice": (lambda x: x * random.random(), "something else every time"),
    "a count that is returned": (lambda x: (x * 2, next(COUNT)), "something else every time"),
    "another buffer": (replaced, "in the place of mean"),
    "other memory": (moved, "in the place of weight"),
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


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_an_error_of_the_step_is_the_users_and_nothing_has_changed(error: Any) -> None:
    before = LAYER.weight.detach().clone()

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            LAYER.weight.mul_(2)
        LAYER(x).sum().backward()
        raise error("of the user's own")

    with pytest.raises(error, match="of the user's own"):
        offload.capture(step, torch.ones(3))
    assert torch.equal(LAYER.weight, before)
    assert LAYER.weight.grad is None


def test_an_input_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(CaptureError, match="input 1 is a float"):
        offload.capture(lambda x, by: x * by, torch.ones(3), 2.0)  # type: ignore[arg-type]


def test_an_input_that_is_returned_as_it_is_is_refused() -> None:
    with pytest.raises(CaptureError, match="returns an input as it is"):
        offload.capture(lambda x, y: (x * 2, y), torch.ones(3), torch.ones(3))
    with pytest.raises(CaptureError, match="runs no operation"):
        offload.capture(lambda x: x, torch.ones(3))


@pytest.mark.parametrize("of_the_module", [True, False])
def test_another_shape_of_what_outlives_the_step_is_refused(of_the_module: bool) -> None:
    """Every step would turn a square of the module's the other way round."""
    square = torch.arange(9.0).view(3, 3)

    def step(x: torch.Tensor) -> torch.Tensor:
        (square if of_the_module else x).t_()
        return x @ square

    with pytest.raises(CaptureError, match="has to run at once"):
        offload.capture(step, torch.ones(3, 3))
