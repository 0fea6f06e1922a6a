"""A step that computes with the trainer's numbers in an unusual way is plain Lightning's."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
from support import offload_lightning as ol
from torch import nn

from trainers import OffloadStrategy

pytestmark = [
    pytest.mark.filterwarnings(line)
    for line in (*ol.QUIET, "ignore:OffloadStrategy trains eagerly")
]


@pytest.mark.parametrize(
    "chooses",
    [
        lambda module, index: int(index) < 3,
        lambda module, index: divmod(index, 4)[0] == 1,
        lambda module, index: operator.rshift(index, 2) == 0,
        lambda module, index: index in {2, 3},
        lambda module, index: module.current_epoch in {1, 2},
        lambda module, index: {1: True}.get(module.current_epoch, False),
        lambda module, index: module.global_step in {4, 5},
    ],
    ids=["int", "divmod", ">>", "set", "epochs", "dict", "steps"],
)
@pytest.mark.parametrize("by_hand", [False, True])
def test_without_audits_a_branch_is_taken_when_plain_lightning_takes_it(
    chooses: Callable[[Any, Any], bool], by_hand: bool
) -> None:
    class Chooses(ol.Module):
        def __init__(self) -> None:
            super().__init__("sgd")
            self.automatic_optimization = not by_hand

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
            loss = loss * (2.0 if chooses(self, batch_idx) else 1.0)
            if by_hand:
                optimizer: Any = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

    options: dict[str, Any] = {"make": Chooses, "validate": False, "loader": ol.data(40)}
    ours = ol.train(OffloadStrategy(), **options)
    theirs = ol.train(**options)
    assert ol.differences(ours, theirs) == []
