"""Weights that a hook computes before every forward pass: they plan, and are found after it."""

import functools
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning
from support import offload_lightning as ol
from torch import nn
from torch.nn.utils import prune

from trainers import OffloadStrategy

pytestmark = [
    *(pytest.mark.filterwarnings(line) for line in ol.QUIET),
    pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated"),
]

HOOKS = {
    "pruned": lambda part: prune.l1_unstructured(part, "weight", 0.5),
    "pruned twice": lambda part: prune.random_unstructured(
        prune.l1_unstructured(part, "weight", 0.5), "weight", 0.3
    ),
    "weight_norm": nn.utils.weight_norm,
    "spectral_norm": nn.utils.spectral_norm,
}


class Seen(L.Callback):
    """What the hooks have left in `head.weight`, after every batch."""

    reads_weights_between_steps = False

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        self.weights.append(pl_module.head.weight.detach().clone())


def hooked(apply: Callable[[Any], Any]) -> ol.Module:
    module = ol.Module()
    apply(module.head)
    apply(module.blocks[1].inner)
    return module


@pytest.mark.parametrize("budget", ["60%", None])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_weight_that_a_hook_computes_is_the_same_after_every_step(
    hook: str, budget: str | None
) -> None:
    make = functools.partial(hooked, HOOKS[hook])
    plain, seen = Seen(), Seen()
    theirs = ol.train("auto", make, callbacks=[plain])
    strategy = OffloadStrategy(budget=budget)
    ours = ol.train(strategy, make, callbacks=[seen])
    assert ol.differences(theirs, ours) == []
    assert len(seen.weights) == len(plain.weights) == 12
    assert all(map(torch.equal, plain.weights, seen.weights))
    assert not torch.equal(seen.weights[0], seen.weights[-1])
    assert "tasks" in strategy.explain()


def pruning(lottery: bool) -> ModelPruning:
    return ModelPruning("l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=lottery)


@pytest.mark.filterwarnings("ignore:.*has captured and planned the .* 3 times")
def test_pruning_in_the_middle_of_a_fit_goes_on_within_the_budget() -> None:
    def run(strategy: Any) -> ol.Result:
        return ol.train(strategy, callbacks=[pruning(lottery=False)], max_epochs=3)

    theirs, ours = run("auto"), run(OffloadStrategy(budget="60%"))
    assert ol.differences(theirs, ours) == []
    zeros = (ours.module.head.weight == 0).float().mean()
    assert 0.4 < zeros < 0.8  # pruned after each of the three passes


def test_lottery_tickets_are_told_to_be_apart_from_the_copy_that_they_come_from() -> None:
    # Lightning has weights share the copy's memory, so in plain Lightning the first steps after a
    # pruning change the copy, and the second pruning goes back to nothing.
    with pytest.warns(RuntimeWarning, match=r"was pointed .* to memory"):
        ol.train(OffloadStrategy(budget="60%"), callbacks=[pruning(lottery=True)])


def test_a_weight_is_left_as_it_was_by_a_capture_that_is_refused() -> None:
    class Counting(ol.Module):
        calls = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.calls += 1
            return super().training_step(batch, batch_idx)

    def make() -> ol.Module:
        module = Counting()
        prune.l1_unstructured(module.head, "weight", 0.5)
        made.append(module.head.weight)
        modules.append(module)
        return module

    made: list[torch.Tensor] = []
    modules: list[ol.Module] = []
    with pytest.raises(Exception, match="calls changes"):
        ol.train(OffloadStrategy(budget="70%"), make, max_steps=1)
    assert modules[0].head.weight is made[0]
