"""A LightningModule of the kind that people write, and the same run with and without the strategy.

train(plain Lightning) ---- result ---- every difference is named ---- train(OffloadStrategy)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import pytest
import torch
from support.accelerators import here
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from offload import BudgetTooSmall
from offload.running.engines.cudagraph import CudaGraph
from trainers import OffloadStrategy

QUIET = (
    "ignore:.*does not have many workers",
    "ignore:.*smaller than the logging interval",
    "ignore:.*litlogger",
    "ignore:You defined a `validation_step`",
    "ignore:.*deprecated:DeprecationWarning",
)
ONE_QUIET_EPOCH: dict[str, Any] = {
    "max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
    "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip
"""What a trainer is told that trains for one epoch and writes nothing."""
WIDTH, CLASSES, SAMPLES, BATCH = 32, 5, 44, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.norm(self.inner(x).relu()))


class Module(L.LightningModule):
    """Dropout, statistics, what is logged by step and by epoch, a scheduler."""

    def __init__(self, optimizer: str = "adamw", interval: str = "step") -> None:
        super().__init__()
        self.kind, self.interval = optimizer, interval
        self.enter = nn.Linear(12, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.enter(x)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self(x)
        loss = nn.functional.cross_entropy(out, y)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"right": (out.argmax(-1) == y).float().mean(), "one": 1.0})
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        if self.kind == "sgd":
            optimizer: Any = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9, nesterov=True)
        elif self.kind == "adam":
            optimizer = torch.optim.Adam(self.parameters(), 3e-3)
        else:
            flat = [p for p in self.parameters() if p.ndim < 2]
            wide = [p for p in self.parameters() if p.ndim >= 2]
            groups = [{"params": wide, "weight_decay": 0.1}, {"params": flat, "lr": 2e-3}]
            optimizer = torch.optim.AdamW(groups, 1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": self.interval}]


def data(samples: int = SAMPLES, batch: int = BATCH) -> DataLoader[Any]:
    noise = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 12, generator=noise)
    y = torch.randint(0, CLASSES, (samples,), generator=noise)
    return DataLoader(TensorDataset(x, y), batch)


@dataclass
class Result:
    module: Any
    trainer: L.Trainer
    strategy: Any
    metrics: dict[str, torch.Tensor]
    """`callback_metrics` and `logged_metrics`."""
    rates: list[float]
    """The learning rate of the first group after every batch."""


class Rates(L.Callback):
    def __init__(self) -> None:
        self.rates: list[float] = []
        self.losses: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        if outputs:  # the step may have been skipped
            self.losses.append(outputs["loss"].clone())


def train(
    strategy: Any = "auto",
    make: Callable[[], L.LightningModule] = Module,
    *,
    seed: int = 3,
    loader: Any = None,
    callbacks: Any = (),
    ckpt_path: Any = None,
    validate: bool = True,
    **options: Any,
) -> Result:
    torch.manual_seed(seed)
    module = make()
    rates = Rates()
    defaults: dict[str, Any] = {
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        **here(),
    }
    trainer = L.Trainer(strategy=strategy, callbacks=[rates, *callbacks], **{**defaults, **options})
    # A resumed run draws other dropout masks than one that went on: all begin alike.
    torch.manual_seed(seed + 1)
    trainer.fit(
        module,
        data() if loader is None else loader,
        data(20) if validate else None,
        ckpt_path=ckpt_path,
    )
    metrics = {f"callback {k}": v.cpu() for k, v in trainer.callback_metrics.items()}
    metrics |= {f"logged {k}": v.cpu() for k, v in trainer.logged_metrics.items()}
    metrics |= {f"loss of batch {n}": loss.cpu() for n, loss in enumerate(rates.losses)}
    return Result(module, trainer, trainer.strategy, metrics, rates.rates)


def differences(one: Result, other: Result) -> list[str]:
    """Everything that is not the same to the last bit, by name."""
    found = _unequal("", one.module.state_dict(), other.module.state_dict())
    left, right = one.trainer.optimizers[0], other.trainer.optimizers[0]
    found += _unequal("optimizer", left.state_dict(), right.state_dict())
    found += _unequal("metric", one.metrics, other.metrics)
    found += [] if one.rates == other.rates else ["learning rates"]
    steps = one.trainer.global_step, other.trainer.global_step
    return found + ([] if steps[0] == steps[1] else [f"global_step {steps}"])


def _unequal(path: str, one: Any, other: Any) -> list[str]:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.shape == other.shape and one.dtype == other.dtype
        return [] if same and torch.equal(one, other) else [path]
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return [f"{path}: {sorted(map(str, one.keys() ^ other.keys()))}"]
        return [line for key in one for line in _unequal(f"{path}.{key}", one[key], other[key])]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [line for n, (a, b) in pairs for line in _unequal(f"{path}[{n}]", a, b)]
    return [] if one == other else [f"{path}: {one} against {other}"]


def keeps_share(strategy: OffloadStrategy, budget: str) -> bool:
    """Whether the arena is so much of what the largest part needs (docs/offload/gpu.md)."""
    most = max(plan.peak_bytes for plan in (strategy.plan, *(one.plan for one in strategy.plans)))
    return strategy.plan.device_bytes - strategy.plan.reserve <= most * float(budget[:-1]) / 100


def smallest(strategy: Callable[..., Any] = OffloadStrategy, **options: Any) -> int:
    """The least budget of a run, as the refusals of smaller ones tell it: one for each part."""
    least = 64
    while True:
        try:
            train(strategy(budget=least), **options)
        except BudgetTooSmall as refused:
            assert refused.needed > least
            least = refused.needed
        else:
            return least


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The pieces of captured steps that are launched from now on."""
    found: list[Any] = []
    launch = CudaGraph._launch

    def launched(self: CudaGraph, graph: Any, *more: Any) -> None:
        found.append(graph)
        launch(self, graph, *more)

    monkeypatch.setattr(CudaGraph, "_launch", launched)
    return found
