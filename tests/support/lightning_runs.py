"""A module that writes down its batches, and small loaders and trainers for it."""

from collections import Counter
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn

from loaders import ReuseLoader
from loaders.pixels.augmentation import Chain, Flip, PadCrop

SAMPLES, BATCH, REUSE = 22, 4, 3
# 22 samples three times: 16 whole batches of 4 and 2 samples more.
BATCHES = 17


class Pictures:
    """Each is noise of its own, so that what was done to it shows."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.Generator().manual_seed(index)
        return torch.randint(0, 256, (3, 6, 6), generator=noise, dtype=torch.uint8), index


class Module(L.LightningModule):
    """Anybody's module, which writes down what it was given."""

    def __init__(self, estimates: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3 * 6 * 6, 2)
        self.estimates = estimates
        self.estimated: float = 0
        self.ids: list[list[int]] = []
        self.pixels: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        pictures, ids = batch
        self.ids.append(ids.tolist())
        self.pixels.append(pictures.clone())
        return nn.functional.cross_entropy(self.net(pictures.flatten(1) / 255.0), ids % 2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.estimates:
            self.estimated = self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Validated(Module):
    """Writes down how many batches it was trained on when it was validated."""

    def __init__(self) -> None:
        super().__init__()
        self.at: list[int] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.at.append(len(self.ids))


class Data(L.LightningDataModule):
    """Makes a loader whenever it is asked for one."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.made: list[ReuseLoader] = []

    def train_dataloader(self) -> ReuseLoader:
        self.made.append(make_loader(**self.options))
        return self.made[-1]


class Rows(DummyLogger):
    """A logger that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:  # type: ignore[override]
        self.rows.append((step, dict(metrics)))


def make_loader(**options: Any) -> ReuseLoader:
    settings = {"reuse": REUSE, "workers": 2, "seed": 3, "augment": Chain((PadCrop(1), Flip()))}
    return ReuseLoader(Pictures(), BATCH, **settings | options)


def make_trainer(*callbacks: L.Callback, **options: Any) -> L.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "max_epochs": 3,
        "enable_model_summary": False, "enable_checkpointing": False, "log_every_n_steps": 1,
    }  # fmt: skip
    return L.Trainer(callbacks=[*callbacks], **settings | options)


def passes_of(ids: list[list[int]], each: int) -> list[Counter[int]]:
    batches = range(0, len(ids), each)
    return [Counter(i for batch in ids[at : at + each] for i in batch) for at in batches]


WHOLE = Counter(dict.fromkeys(range(SAMPLES), REUSE))


class Longer(L.Callback):
    """Reuses once more in every pass."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        loader = trainer.train_dataloader
        assert isinstance(loader, ReuseLoader)
        loader.set_reuse(loader.reuse + 1)
