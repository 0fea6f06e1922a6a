"""LightningModules that other people write, each with one thing that a watcher might overlook.

Every subclass of `Case` is one, here and in live_holders.py, live_python.py, live_hooks.py and
live_features.py: test_live_strategy_cases.py trains it with and without the strategy.
"""
# pyright: reportAttributeAccessIssue=false

import math
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
        self.between(optimizer, batch_idx)
        optimizer.step()
        self.log("loss", loss)
        return {"loss": loss.detach()}

    def between(self, optimizer: Any, batch_idx: int) -> None:
        pass


class RateInStep(Case):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.optimizers().param_groups[0]["lr"] = 1e-2 / (1 + self.global_step)
        return super().training_step(batch, batch_idx)


class RateAfterBackward(Case):
    def on_after_backward(self) -> None:
        self.trainer.optimizers[0].param_groups[0]["lr"] = 1e-2 * math.cos(self.global_step)


class RateBeforeStep(Case):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
            group["betas"] = (0.9, 0.99 + self.global_step * 1e-4)


class RateManual(Manual):
    def between(self, optimizer: Any, batch_idx: int) -> None:
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + batch_idx)


class RateOfTensor(Case):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), torch.tensor(1e-2), foreach=False)
        return [optimizer], [
            {
                "scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, 20),
                "interval": "step",
            }
        ]


class Annealed(Case):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight = min(1.0, self.global_step / 7)
        loss = self.loss(batch) + weight * self.head.weight.square().sum() * 1e-2
        loss = loss * (1 + 0.1 * (batch_idx % 3)) + self.current_epoch * self.head.bias.sum()
        self.log_dict({"loss": loss, "weight": weight})
        return loss


class Counters(Case):
    """The module does something else after so many steps."""

    options: ClassVar[Any] = {"max_epochs": 13}

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.counts = {"calls": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counts["calls"] += 1
        out = super().forward(x)
        return out * 2 if self.counts["calls"] > 90 else out

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        loss = self.loss(batch)
        return loss if self.steps <= 70 else loss * 0.5


class TwoNumbers(Case):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scheduler = self.lr_schedulers()
        self.log("first", scheduler.get_last_lr()[0])
        self.log("second", scheduler.get_last_lr()[1], prog_bar=True)
        self.log("decay", self.optimizers().param_groups[1]["weight_decay"])
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [*self.body.parameters(), *self.enter.parameters()], "weight_decay": 0.1},
            {"params": self.head.parameters(), "lr": 2e-3, "weight_decay": 0.2},
        ]
        optimizer = torch.optim.AdamW(groups, 1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    @classmethod
    def callbacks(cls) -> list[L.Callback]:
        return [Decay()]


class Decay(L.Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.optimizers[0].param_groups[1]["weight_decay"] *= 1.5


class OwnOptimizer(Case):
    class Sign(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 1e-3, "step": 0})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            for group in self.param_groups:
                group["step"] += 1
                for p in group["params"]:
                    state = self.state[p]
                    if not state:
                        state["mean"] = torch.zeros_like(p)
                        state["count"] = 0
                    state["count"] += 1
                    state["mean"].mul_(0.9).add_(p.grad, alpha=0.1)
                    correction = 1 - 0.9 ** group["step"]
                    p.add_((state["mean"] / correction).sign(), alpha=-group["lr"])
            return loss

    def configure_optimizers(self) -> Any:
        return self.Sign(self.parameters())
