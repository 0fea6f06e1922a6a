"""LightningModules that others write, each with one thing that a watcher might overlook.

Every subclass of `Case` is one, here and in live_holders.py, live_hooks.py, live_features.py and
live_runs.py: test_live_strategy_cases.py trains it with and without the strategy.
"""
# pyright: reportAttributeAccessIssue=false

from typing import Any, ClassVar

import lightning as L
import torch
from support import offload_lightning as ol
from torch import nn
from torch.nn import functional as F

WIDTH = 32


class Case(L.LightningModule):
    """A small net, which the cases change. `seen` is compared as well."""

    options: ClassVar[Any] = {}
    only: ClassVar[Any] = ()
    """The budgets that it is trained with, if not with one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.enter = nn.Linear(12, WIDTH)
        self.body = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(3))
        )
        self.head = nn.Linear(WIDTH, ol.CLASSES)

    @classmethod
    def loader(cls) -> Any:
        return None

    @classmethod
    def callbacks(cls) -> list[L.Callback]:
        return []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.enter(x)))

    def loss(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Manual(Case):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss)
        return {"loss": loss.detach()}


class RateOfTensor(Case):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), torch.tensor(1e-2), foreach=False)
        return [optimizer], [
            {
                "scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, 20),
                "interval": "step",
            }
        ]
