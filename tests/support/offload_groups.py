"""Runs with gradient accumulation, with and without OffloadStrategy."""

import functools
from typing import Any

import lightning as L
import pytest
import torch
from support import offload_lightning as ol
from torch import nn
from torchmetrics import MeanMetric

from offload import BudgetTooSmall
from trainers import OffloadStrategy
from trainers.offloading.steps import groups

WIDTH = 136


@pytest.fixture(autouse=True)
def taken_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow these tiny models are so."""
    monkeypatch.setattr(groups, "FASTER", 1e9)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.norm(self.inner(x).relu()))


class Module(L.LightningModule):
    """Dropout, statistics, a metric, what is logged by step and by epoch, a scheduler."""

    def __init__(self, lora: bool = False) -> None:
        super().__init__()
        self.enter = nn.Linear(12, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(WIDTH, 5)
        self.mean = MeanMetric()
        if lora:
            self.blocks.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.cross_entropy(self.head(self.blocks(self.enter(x))), y)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.mean(loss.detach())
        self.log("metric", self.mean, on_step=False, on_epoch=True)
        self.log_dict({"mean x": x.mean(), "one": 1.0}, on_step=True, on_epoch=True)
        return {"loss": loss, "x": x}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self.head(self.blocks(self.enter(batch[0])))
        self.log("val_loss", nn.functional.cross_entropy(out, batch[1]))

    def configure_optimizers(self) -> Any:
        used = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(used, 1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Kept(L.pytorch.loggers.Logger):  # type: ignore[name-defined]
    """All that is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int | None, dict[str, float]]] = []

    name = version = "kept"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.lines.append((step, dict(metrics)))

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Lightning's loggers must have it. These tests look at metrics alone."""


def train(strategy: Any = "auto", *, make: Any = Module, loader: Any = None, **options: Any) -> Any:
    torch.manual_seed(3)
    module, logger = make(), Kept()
    given: dict[str, Any] = {
        "max_epochs": 3,
        "accumulate_grad_batches": 2,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "accelerator": "cpu",
    }
    trainer = L.Trainer(strategy=strategy, logger=logger, **{**given, **options})
    torch.manual_seed(4)
    trainer.fit(module, ol.data(88) if loader is None else loader(), ol.data(20))
    metrics: dict[str, Any] = {f"callback {k}": v for k, v in trainer.callback_metrics.items()}
    metrics |= {f"logged {k}": v for k, v in trainer.logged_metrics.items()}
    metrics |= {"lines": logger.lines, "metric": module.mean.metric_state}
    metrics |= {"random": torch.get_rng_state()}
    return ol.Result(module, trainer, trainer.strategy, metrics, [])


def smallest(options: dict[str, Any]) -> int:
    with pytest.raises(BudgetTooSmall) as refused:
        train(OffloadStrategy(budget=64), **options)
    return refused.value.needed


def together(result: Any) -> set[int]:
    """How many micro-batches were run at a time."""
    parts = [plan.part for plan in result.strategy.plans]
    return {int(part.split()[0]) for part in parts if part.endswith("micro-batches")}


# 11 batches, the last one as large as the others: the last group of 2 and 3 and 4 is smaller.
RUNS: dict[str, dict[str, Any]] = {
    "2": {},
    "3": {"accumulate_grad_batches": 3},
    "4": {"accumulate_grad_batches": 4},
    "clipped": {"accumulate_grad_batches": 4, "gradient_clip_val": 0.1},
    "lora": {"make": functools.partial(Module, True), "accumulate_grad_batches": 3},
    "bf16": {"precision": "bf16-mixed", "accumulate_grad_batches": 3},
    "last batch smaller": {"loader": functools.partial(ol.data, 85), "accumulate_grad_batches": 4},
    "limited": {"limit_train_batches": 7, "accumulate_grad_batches": 3},
    "max_steps": {"max_epochs": -1, "max_steps": 8},
}


@functools.cache
def plain(name: str) -> Any:
    return train(**RUNS[name])
