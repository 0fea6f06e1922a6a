"""The LightningModule for language models, which predict each next token.

    ids [batch, sequence] -> logits [batch, sequence, vocabulary] -> cross entropy with the targets

Perplexity is exp of the mean loss per token. While training it is that of a batch, in validation
and test that of the whole text. It counts tokens and not words, so perplexities under different
vocabularies cannot be compared.
"""

import math
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.nn import functional

from perfect.config.schema import OptimizerConfig
from perfect.models.classification import make_optimizer
from perfect.text.padding import IGNORED


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
        if self.padded:
            self._add_up(batch, stage)
            return
        tokens = batch[1].numel()  # the mean is over tokens, as the last batch may be smaller
        self.log(
            f"{stage}_loss", self._loss(batch),
            on_step=False, on_epoch=True, batch_size=tokens, sync_dist=True,
        )  # fmt: skip

    def _add_up(self, batch: Any, stage: str) -> None:
        """Add up losses and tokens: how many tokens are no padding is known on the device alone."""
        ids, targets = batch
        logits, following = self(ids).flatten(0, 1), targets.flatten()
        loss = functional.cross_entropy(logits, following, ignore_index=IGNORED, reduction="sum")
        tokens = (following != IGNORED).sum().to(loss.dtype)
        for name, value in ((f"{stage}_loss_sum", loss), (f"{stage}_tokens", tokens)):
            self.log(name, value, on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)

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
