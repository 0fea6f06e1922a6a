"""The LightningModule that classifies pictures."""

import math
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.nn import functional

from perfect.callbacks.phase_records import SAMPLE_LOSSES
from perfect.config.schema import OptimizerConfig
from perfect.text.padding import IGNORED

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


class LanguageTask(L.LightningModule):
    """Trains `model` with cross entropy, and measures its perplexity. A batch is (ids, the token
    after each id). Targets of -100 are padding (perfect/text/padding.py): a loss is the mean over
    the others."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerConfig,
        label_smoothing: float = 0.0,
        padded: bool = False,
    ) -> None:
        """`padded`: batches have padding, so that they differ in tokens."""
        super().__init__()
        self.model = model
        self.optimizer = optimizer
        self.label_smoothing = label_smoothing
        self.padded = padded

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self._loss(batch, self.label_smoothing)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_perplexity", loss.detach().exp())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def on_validation_epoch_end(self) -> None:
        self._log_perplexity("val")

    def on_test_epoch_end(self) -> None:
        self._log_perplexity("test")

    def _loss(self, batch: Any, label_smoothing: float = 0.0) -> torch.Tensor:
        ids, targets = batch
        logits = self(ids).flatten(0, 1)
        return functional.cross_entropy(
            logits, targets.flatten(), ignore_index=IGNORED, label_smoothing=label_smoothing
        )

    def _evaluate(self, batch: Any, stage: str) -> None:
        if self.padded:  # how many tokens are no padding is known on the device alone
            ids, targets = batch
            logits, following = self(ids).flatten(0, 1), targets.flatten()
            loss = functional.cross_entropy(
                logits, following, ignore_index=IGNORED, reduction="sum"
            )
            tokens = (following != IGNORED).sum().to(loss.dtype)
            for name, value in ((f"{stage}_loss_sum", loss), (f"{stage}_tokens", tokens)):
                self.log(name, value, on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
            return
        tokens = batch[1].numel()  # the mean is over tokens, as the last batch may be smaller
        self.log(
            f"{stage}_loss", self._loss(batch),
            on_step=False, on_epoch=True, batch_size=tokens, sync_dist=True,
        )  # fmt: skip

    def _log_perplexity(self, stage: str) -> None:
        metrics = self.trainer.callback_metrics
        if self.padded:
            mean = metrics[f"{stage}_loss_sum"] / metrics[f"{stage}_tokens"]
            self.log(f"{stage}_loss", mean, rank_zero_only=False)
        else:
            mean = metrics[f"{stage}_loss"]
        loss = float(mean)
        perplexity = math.exp(loss) if loss < 700 else math.inf
        self.log(f"{stage}_perplexity", perplexity, rank_zero_only=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self, self.optimizer)
