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

from perfect.models.classification import OptimizerSpec, make_optimizer


class LanguageTask(L.LightningModule):
    """Trains `model` with cross entropy, and measures its perplexity. A batch is (ids, the token
    after each id)."""

    def __init__(
        self, model: nn.Module, optimizer: OptimizerSpec, label_smoothing: float = 0.0
    ) -> None:
        super().__init__()
        self.model = model
        self.optimizer = optimizer
        self.label_smoothing = label_smoothing

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
        return functional.cross_entropy(logits, targets.flatten(), label_smoothing=label_smoothing)

    def _evaluate(self, batch: Any, stage: str) -> None:
        tokens = batch[1].numel()  # the mean is over tokens, as the last batch may be smaller
        self.log(
            f"{stage}_loss", self._loss(batch),
            on_step=False, on_epoch=True, batch_size=tokens, sync_dist=True,
        )  # fmt: skip

    def _log_perplexity(self, stage: str) -> None:
        loss = float(self.trainer.callback_metrics[f"{stage}_loss"])
        perplexity = math.exp(loss) if loss < 700 else math.inf
        self.log(f"{stage}_perplexity", perplexity, rank_zero_only=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self, self.optimizer)
