"""The first of the callbacks while updates may be pending: it has them run before anybody looks.

    step, step, step  | on_train_epoch_end   on_validation_start   on_train_end   on_exception
                      | first of all: the late updates of the last step; then everybody else's

Checkpoints in mid-epoch go through the strategy, which does the same.
"""

from collections.abc import Callable
from typing import Any

import lightning as L


class Whole(L.Callback):
    """Of one fit."""

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush = flush

    def stand_in(self, trainer: L.Trainer) -> None:
        """Its callbacks may be others than they were."""
        callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        if self not in callbacks:
            callbacks.insert(0, self)

    def leave(self, trainer: L.Trainer) -> None:
        callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        if self in callbacks:
            callbacks.remove(self)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._flush()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._flush()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._flush()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self._flush()
