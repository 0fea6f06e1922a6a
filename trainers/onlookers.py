"""Who may look at a run between two batches: where somebody may, nothing is put off.

    on_train_batch_end(...)   the loss, the logged values, the weights: as plain Lightning has them

Hooks of Lightning's own callbacks are known. What these read is there when it changes: at the end
of an optimizer step.
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

from trainers.hooks import Hook

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
    """The first who may, with the line; empty: nobody."""
    callbacks: list[L.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    for callback in callbacks:
        for name in HOOKS:
            # A class made from a known one may do anything.
            if type(callback) not in KNOWN and is_overridden(name, callback, L.Callback):
                return str(Hook(callback, name))
    for name in HOOKS:
        if is_overridden(name, module):
            return str(Hook(module, name))
    return ""
