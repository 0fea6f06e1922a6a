"""Small GPTs that differ in learning rate and seed: the arguments of `Fleet.add`."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import lightning as L
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from perfect.models.gpt2 import Gpt2, Gpt2Shape


@dataclass(frozen=True, slots=True)
class GptSize:
    layers: int = 4
    width: int = 256
    heads: int = 4
    length: int = 128
    words: int = 2048
    batch: int = 8
    steps: int = 50


class GptJob(L.LightningModule):
    """Cross entropy of the next word; it logs its loss over the last batch as `loss`."""

    def __init__(self, size: GptSize, lr: float) -> None:
        super().__init__()
        self.lr = lr
        shape = Gpt2Shape(size.layers, size.heads, size.width, positions=size.length)
        self.net = Gpt2(shape, size.words)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (ids,) = batch
        logits = self.net(ids[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.lr)


def configurations(jobs: int, size: GptSize) -> list[dict[str, Any]]:
    """What `make` gets, by job."""
    return [
        {"seed": number, "lr": 1e-4 * 1.5**number, "size": asdict(size)} for number in range(jobs)
    ]


def make(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Fleet.add`."""
    size = GptSize(**config["size"])

    def words() -> DataLoader[Any]:
        dice = torch.Generator().manual_seed(config["seed"])
        shape = (size.steps * size.batch, size.length + 1)
        return DataLoader(
            TensorDataset(torch.randint(size.words, shape, generator=dice)), size.batch
        )

    return {
        "module": lambda: GptJob(size, config["lr"]),
        "train": words,
        "trainer": {"max_epochs": 1, "enable_checkpointing": False, "logger": False},
        "seed": config["seed"],
    }
