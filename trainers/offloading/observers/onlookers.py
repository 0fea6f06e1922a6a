"""Finds code that may observe a run between two micro-batches; then none of them is deferred.

    on_train_batch_end(...)   finds the loss, the logged values and the weights of plain Lightning

Lightning's own callbacks are known: what they read changes only at the end of an optimizer step,
and is up to date then.
"""

import lightning as L
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    RichModelSummary,
    RichProgressBar,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.utilities.model_helpers import is_overridden

from trainers.offloading.tracing.hooks import Hook

HOOKS = ("on_train_batch_start", "on_train_batch_end")
KNOWN = (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    RichModelSummary,
    RichProgressBar,
    Timer,
    TQDMProgressBar,
)


def onlooker(trainer: L.Trainer, module: L.LightningModule) -> str:
    """Name the first hook that may observe micro-batches, with its line; empty if there is none."""
    callbacks: list[L.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    for callback in callbacks:
        for name in HOOKS:
            # A subclass of a known class may do anything.
            if type(callback) not in KNOWN and is_overridden(name, callback, L.Callback):
                return str(Hook(callback, name))
    for name in HOOKS:
        if is_overridden(name, module):
            return str(Hook(module, name))
    return ""
