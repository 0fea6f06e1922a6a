"""The LightningModule that classifies pictures.

Pictures arrive as uint8 and become normalised floats on the device. The training step returns one
loss per sample, so that the plateau rule can tell first serves from later ones.
"""

from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.nn import functional

from perfect.callbacks.first_serves import SAMPLE_LOSSES
from perfect.config.schema import OptimizerConfig

# Mean and standard deviation of natural photographs, per channel, on a scale of 0 to 255.
PHOTO_MEAN = (123.675, 116.28, 103.53)
PHOTO_STD = (58.395, 57.12, 57.375)


class ClassificationTask(L.LightningModule):
    """Trains `model` with cross entropy, and measures its accuracy."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerConfig,
        label_smoothing: float = 0.0,
        mean: Sequence[float] = PHOTO_MEAN,
        std: Sequence[float] = PHOTO_STD,
    ) -> None:
        super().__init__()
        self.model = model.to(memory_format=torch.channels_last)
        self.optimizer = optimizer
        self.label_smoothing = label_smoothing
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1), persistent=False)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        pixels = pictures.to(memory_format=torch.channels_last)
        return self.model((pixels.float() - self.mean) / self.std)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        pictures, labels = batch
        losses = functional.cross_entropy(
            self(pictures), labels, label_smoothing=self.label_smoothing, reduction="none"
        )
        loss = losses.mean()
        self.log("train_loss", loss, prog_bar=True)
        return {"loss": loss, SAMPLE_LOSSES: losses.detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def _evaluate(self, batch: Any, stage: str) -> None:
        pictures, labels = batch
        logits = self(pictures)
        right = (logits.argmax(1) == labels).float().mean()
        loss = functional.cross_entropy(logits, labels)
        results = {f"{stage}_accuracy": right, f"{stage}_loss": loss}
        self.log_dict(results, on_step=False, on_epoch=True, batch_size=len(labels), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self, self.optimizer)


def make_optimizer(module: nn.Module, spec: OptimizerConfig) -> torch.optim.Optimizer:
    """Build the optimizer of all parameters of `module` that are not frozen."""
    learned = [p for p in module.parameters() if p.requires_grad]
    # Only matrices decay: on a normalisation's scale weight decay works against the learning rate.
    decayed = [p for p in learned if p.ndim > 1]
    kept = [p for p in learned if p.ndim <= 1]
    groups = [
        {"params": decayed, "weight_decay": spec.weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if spec.name == "adamw":
        first, second = spec.betas
        return torch.optim.AdamW(groups, lr=spec.lr, betas=(first, second))
    return torch.optim.SGD(groups, lr=spec.lr, momentum=spec.momentum, nesterov=spec.nesterov)
