"""A step that cannot be captured says where and what to do, and leaves no mark."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.offload_counting import BATCH, Counting, train
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from offload.errors import CaptureError
from offload.tracing.capture import traced as capture
from offload.tracing.capture import traced_training_step as capture_training_step

HERE = Path(__file__)
WEIGHT = nn.Parameter(torch.ones(3, 3))
DICE = torch.Generator()


def marked(function: Callable[..., Any]) -> int:
    """The line of a function that ends with `# here`."""
    lines = HERE.read_text().splitlines()
    begin = function.__code__.co_firstlineno
    return next(n for n in range(begin, len(lines) + 1) if lines[n - 1].endswith("# here"))


def asks_item(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()  # here


def asks_a_parameter(x: torch.Tensor) -> torch.Tensor:
    return x * float(WEIGHT.sum())  # here


def branches(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:  # here
        return x
    return -x


def picks_by_mask(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0]  # here


def looks_for_unique(x: torch.Tensor) -> torch.Tensor:
    return x.unique()  # here


def lists(x: torch.Tensor) -> torch.Tensor:
    return x * WEIGHT.tolist()[0][0]  # here


def asks_numpy(x: torch.Tensor) -> torch.Tensor:
    return x * float(WEIGHT.detach().numpy()[0, 0])  # here


def resizes(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y.resize_(2, 2)  # here


def goes_backward(x: torch.Tensor) -> torch.Tensor:
    loss = (x @ WEIGHT).sum()
    loss.backward()  # here
    return loss


def sets_data(x: torch.Tensor) -> torch.Tensor:
    WEIGHT.data = x[:3]  # here
    return x


def sets_grad(x: torch.Tensor) -> torch.Tensor:
    WEIGHT.grad = x[:3]  # here
    return x


def steps_an_optimizer(x: torch.Tensor) -> torch.Tensor:
    torch.optim.SGD([WEIGHT], 0.1).step()  # here
    return x


def fails_by_itself(x: torch.Tensor) -> torch.Tensor:
    return x @ torch.zeros(5, 5)  # here


def raises_its_own(x: torch.Tensor) -> torch.Tensor:
    raise KeyError("nothing there")  # here


def conjugates(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(torch.stack((x, x), -1)).conj() * 2  # here


def makes_sparse(x: torch.Tensor) -> torch.Tensor:
    return x.to_sparse()  # here


FAILURES: tuple[tuple[Callable[..., Any], str], ...] = (
    (asks_item, "torch.where"),
    (asks_a_parameter, "torch.where"),
    (branches, "torch.where"),
    (picks_by_mask, "mask"),
    (looks_for_unique, "shape"),
    (lists, "tolist|torch.where"),
    (asks_numpy, "numpy"),
    (resizes, "new tensor"),
    (goes_backward, "torch.autograd.grad"),
    (sets_data, "in place"),
    (sets_grad, "in place"),
    (steps_an_optimizer, "capture_training_step"),
    (fails_by_itself, "reduction dim"),
    (raises_its_own, "KeyError: 'nothing there'"),
    (conjugates, "resolve_conj"),
    (makes_sparse, ""),
)


@pytest.mark.parametrize(
    ("step", "said"), FAILURES, ids=lambda found: getattr(found, "__name__", "")
)
def test_what_cannot_be_captured_is_named_with_the_users_line(
    step: Callable[..., Any], said: str
) -> None:
    state, values = torch.get_rng_state(), WEIGHT.detach().clone()
    with pytest.raises(CaptureError) as caught:
        capture(step, torch.ones(4, 3))
    text = str(caught.value)
    assert f"{HERE.name}:{marked(step)} in {step.__name__}" in text
    assert re.search(said, text)
    assert WEIGHT.grad is None
    assert type(WEIGHT.data) is torch.Tensor
    assert torch.equal(WEIGHT, values)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_failure_keeps_what_caused_it() -> None:
    with pytest.raises(CaptureError) as caught:
        capture(raises_its_own, torch.ones(4, 3))
    assert isinstance(caught.value.__cause__, KeyError)


def test_gradients_filled_without_a_method_are_taken_back() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (x @ WEIGHT).sum()
        torch.autograd.backward(loss)
        return loss.detach()

    with pytest.raises(CaptureError, match=r"\.grad of WEIGHT"):
        capture(step, torch.ones(4, 3))
    assert WEIGHT.grad is None


def test_a_buffer_that_would_keep_autograd_alive_is_refused() -> None:
    total = torch.zeros(3)

    def step(x: torch.Tensor) -> torch.Tensor:
        total.add_((x @ WEIGHT).sum(0))
        return total.detach()

    with pytest.raises(CaptureError, match=r"total in place.*detach"):
        capture(step, torch.ones(4, 3))
    assert not total.requires_grad


# random numbers


def seeds(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    return x + torch.rand(3)


def seeds_a_generator(x: torch.Tensor) -> torch.Tensor:
    DICE.manual_seed(3)
    return x + torch.rand(3, generator=DICE)


def recomputes_a_dropout(x: torch.Tensor) -> Any:
    y = checkpoint(lambda a: functional.dropout(a @ WEIGHT).tanh(), x, use_reentrant=False)
    return torch.autograd.grad(y.sum(), WEIGHT)


@pytest.mark.parametrize("step", [seeds, seeds_a_generator, recomputes_a_dropout])
def test_random_numbers_that_are_drawn_again_are_refused(step: Any) -> None:
    state = torch.get_rng_state()
    with pytest.raises(CaptureError, match="the step sets the state of the random numbers"):
        capture(step, torch.ones(4, 3))
    assert torch.equal(torch.get_rng_state(), state)


def test_checkpointing_without_dropout_is_captured() -> None:
    def step(x: torch.Tensor) -> Any:
        y = checkpoint(lambda a: (a @ WEIGHT).tanh(), x, use_reentrant=False)
        return torch.autograd.grad(y.sum(), WEIGHT)

    assert len([t for t in capture(step, torch.ones(4, 3)).tasks if "tanh" in t.name]) >= 2


def test_capturing_draws_no_random_numbers() -> None:
    state = torch.get_rng_state()
    capture(lambda x: functional.dropout(x), torch.ones(9))
    assert torch.equal(torch.get_rng_state(), state)


# training steps that are none


class Reentrant(Counting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.linear, x.requires_grad_(), use_reentrant=True)


@pytest.mark.parametrize(
    ("make", "loss", "said"),
    [
        (lambda: nn.Linear(3, 2), lambda out, y: out, r"\(4, 2\): return a single number"),
        (lambda: nn.Linear(3, 2), lambda out, y: 3.0, "float: return a single number"),
        (lambda: nn.Linear(3, 2), lambda out, y: out.detach().sum(), "no parameter"),
        (lambda: nn.Linear(3, 2), lambda out, y: WEIGHT.sum(), "no parameter"),
        (lambda: nn.Linear(3, 2).requires_grad_(False), functional.cross_entropy, "no parameter"),
        (Reentrant, functional.cross_entropy, "use_reentrant=False"),
        (lambda: torch.compile(nn.Linear(3, 2)), functional.cross_entropy, "torch.compile"),
    ],
)
def test_a_training_step_that_trains_nothing_is_refused(make: Any, loss: Any, said: str) -> None:
    module = make()
    with pytest.raises(CaptureError, match=said):
        train(module, loss)
    assert all(p.grad is None for p in module.parameters())


def test_a_parameter_that_is_a_piece_of_a_larger_tensor_is_refused() -> None:
    module = nn.Linear(3, 2, bias=False)
    module.weight = nn.Parameter(torch.randn(4, 3)[:2])
    with pytest.raises(CaptureError, match="weight shares its storage with other tensors"):
        train(module)


def test_a_hook_on_an_accumulated_gradient_is_refused() -> None:
    module = nn.Linear(3, 2)
    module.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(CaptureError, match="weight has a post-accumulate hook"):
        train(module)


def test_hooks_on_gradients_are_part_of_the_step() -> None:
    module = nn.Linear(3, 2)
    module.weight.register_hook(lambda g: g * 2)
    assert "mul" in " ".join(t.name for t in train(module).tasks)


def test_what_is_no_tensor_is_named() -> None:
    with pytest.raises(CaptureError, match="element 1 of the batch is a list"):
        capture(lambda x, y: x, torch.ones(3), [1])


def test_nothing_is_begun_for_a_step_that_fails() -> None:
    module = Counting()
    optimizer = torch.optim.AdamW(module.parameters())
    with pytest.raises(CaptureError):
        capture_training_step(module, functional.cross_entropy, optimizer, *BATCH)
    assert not optimizer.state
