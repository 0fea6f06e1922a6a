"""Optimizers that no plan can follow: refused by name, and left as they were."""

from typing import Any

import own_optimizers as own
import pytest
from support.optimizer_twins import Twins, batch, loss_of, made_by, net
from torch import optim

import offload
from offload import CaptureError, OffloadError, Runner


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (own.Branching, "asks for the value"),
        (own.Asking, "asks for the value"),
        (own.Together, "combines several parameters"),
        (own.Noisy, "random numbers"),
        (own.Counting, "attribute 'calls'"),
        (own.Adapting, "'k' of group 0"),
        (own.Norms, "single number that depends"),
        (own.Listing, "'past' is a list"),
        (own.Numbered, "treats a parameter otherwise"),
        (optim.LBFGS, "closure"),
        (optim.SparseAdam, "dense gradients"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(kind: Any, reason: str) -> None:
    module = net()
    optimizer = kind(module.parameters())
    with pytest.raises(CaptureError, match=f"{kind.__name__}.*{reason}"):
        offload.capture_training_step(module, loss_of, optimizer, *batch(0))
    for p in module.parameters():
        assert p.grad is None
    module(batch(0)[0]).sum().backward()
    if kind not in (optim.LBFGS, optim.SparseAdam):
        optimizer.step()  # the optimizer is as it was


@pytest.mark.parametrize("flag", ["capturable", "differentiable"])
def test_flags_that_move_numbers_into_the_step_are_refused(flag: str) -> None:
    module = net()
    flags: dict[str, Any] = {flag: True}
    optimizer = optim.NAdam(module.parameters(), foreach=False, **flags)
    with pytest.raises(CaptureError, match=f"NAdam.*{flag}=True"):
        offload.capture_training_step(module, loss_of, optimizer, *batch(0))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (own.Growing, "Growing: its step makes"),
        (own.Late, "Late: its step calls .*norm"),
    ],
)
def test_a_later_step_that_does_something_else_is_an_error(kind: Any, said: str) -> None:
    twins = Twins.of(made_by(kind, {}))
    with Runner(offload.plan(twins.graph()), "serial") as runner:
        for number in range(39):
            runner(*batch(number))
        with pytest.raises(OffloadError, match=said):
            runner(*batch(39))
