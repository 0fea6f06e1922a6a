"""Tensors that lie in the memory of a weight stay there, whichever step knows of them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from support import offload_lightning as ol
from torch import nn
from torch.utils.data import DataLoader

from trainers import OffloadStrategy

pytestmark = [pytest.mark.filterwarnings(line) for line in ol.QUIET]
ROWS = (8, 4, 8, 4, 8, 8, 4)
"""Two shapes in turns, so that there are two plans."""


class Aliased(L.LightningModule):
    """`change` may do something to the module after each step."""

    def __init__(self, change: Callable[["Aliased", int], None]) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 5)
        self.alias: Any = self.inner.weight.data
        self.seen: list[torch.Tensor] = []
        self.change = change

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.inner(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.5)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.change(self, batch_idx)
        self.seen += [self.inner.weight.detach().clone()]
        self.seen += [] if self.alias is None else [self.alias.clone()]


def trained(strategy: Any, change: Callable[[Aliased, int], None]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    module = Aliased(change)
    batches: Any = [torch.randn(rows, 12) for rows in ROWS]
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return module.seen


def forgotten(module: Aliased, batch_idx: int) -> None:
    """The first plan knows the alias, the second one does not."""
    module.alias = None


def found_late(module: Aliased, batch_idx: int) -> None:
    """The second plan knows the alias, the first one does not; somebody writes into it."""
    if batch_idx == 0:
        module.alias = module.inner.weight.data[:2]
    elif batch_idx >= 2:
        module.alias.mul_(0.5)


def handed_on(module: Aliased, batch_idx: int) -> None:
    """Somebody else writes into the alias, after no module has it any more."""
    if batch_idx == 0:
        others.append(module.alias)
        module.alias = None
    others[-1].mul_(0.9)


others: list[torch.Tensor] = []


def pointed(which: str, module: Aliased, batch_idx: int) -> None:
    """The weight, its alias or both get memory of their own."""
    if batch_idx == 1 and which != "alias":
        module.inner.weight.data = torch.ones(5, 12)
    if batch_idx == 1 and which != "weight":
        module.alias.data = torch.zeros(5, 12)


def pointed_to_others(module: Aliased, batch_idx: int) -> None:
    """Somebody else holds the weight's new memory, and nobody the next one."""
    if batch_idx == 2:
        others.append(torch.ones(5, 12))
        module.inner.weight.data = others[-1].data
    elif batch_idx == 4:
        module.alias = others[-1]
        module.inner.weight.data = torch.zeros(5, 12)


CHANGES = [
    forgotten, found_late, handed_on, pointed_to_others,
    *(partial(pointed, which) for which in ("weight", "alias", "both")),
]  # fmt: skip


@pytest.mark.parametrize("budget", ["70%", None])
@pytest.mark.parametrize("change", CHANGES)
def test_a_weight_and_its_aliases_are_plain_lightnings(change: Any, budget: str | None) -> None:
    plain, ours = trained("auto", change), trained(OffloadStrategy(budget=budget), change)
    assert len(plain) == len(ours)
    assert all(map(torch.equal, plain, ours))
    assert not torch.equal(ours[0], ours[-1])
