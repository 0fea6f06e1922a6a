"""One surveyed module: how it is made, and the batches that it is trained on."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.nn import functional

Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    library: str
    """The package that the module comes from: `import LIBRARY`, `pip install LIBRARY`."""
    module: Callable[[], L.LightningModule]
    batch: Callable[[], Any]
    """Makes a random batch."""

    def batches(self, steps: int, different: int) -> list[Any]:
        """A batch for every step: so many different ones, in turns."""
        made = [self.batch() for _ in range(different)]
        return [made[number % different] for number in range(steps)]


class Wrapped(L.LightningModule):
    """What a user writes around a bare model: a loss over its output, and AdamW."""

    def __init__(self, net: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.net = net
        self.loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(self.net, batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def wrapped(
    name: str, library: str, net: Callable[[], nn.Module], batch: Callable[[], Any], loss: Loss
) -> Case:
    return Case(name, library, lambda: Wrapped(net(), loss), batch)


def library(name: str) -> Any:
    """The package, imported where it is needed: the survey runs without those that are missing."""
    return importlib.import_module(name)


# ---- losses and batches that several libraries share ---------------------------------------------


def class_loss(net: nn.Module, batch: Any) -> torch.Tensor:
    pictures, classes = batch
    return functional.cross_entropy(net(pictures), classes)


def own_loss(net: nn.Module, batch: Any) -> torch.Tensor:
    """The loss that the model itself makes of labels, as those of transformers do."""
    return net(**batch).loss


def pictures(size: int = 32, count: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 3, size, size), torch.randint(0, 10, (count,))


def classified_pictures(size: int = 32) -> dict[str, torch.Tensor]:
    x, y = pictures(size)
    return {"pixel_values": x, "labels": y}


def padded_text(labels: str = "words", rows: int = 4, length: int = 12) -> dict[str, torch.Tensor]:
    """Rows of several lengths, padded. `labels`: one class a row, or a word a word."""
    mask = torch.arange(length) < torch.randint(length // 2, length + 1, (rows, 1))
    words = torch.randint(4, 64, (rows, length)).masked_fill(~mask, 0)
    wanted = {
        "words": words.masked_fill(~mask, -100),
        "classes": torch.randint(0, 2, (rows,)),
    }
    return {"input_ids": words, "attention_mask": mask.long(), "labels": wanted[labels]}
