"""While updates may be pending, this callback comes first and runs them before others read weights.

    step, step, step  | on_train_epoch_end   on_validation_start   on_train_end   on_exception
                      | first the late updates of the last step run, then the other callbacks

Checkpoints in mid-epoch go through the strategy, which runs the late updates too.
"""

from collections.abc import Callable
from typing import Any

import lightning as L


class FlushingCallback(L.Callback):
    """Calls `flush` at each hook where other callbacks may read the weights of one fit."""

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush = flush

    def attach(self, trainer: L.Trainer) -> None:
        """Insert this callback in front, again if the user has changed the list since."""
        callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        if self not in callbacks:
            callbacks.insert(0, self)

    def detach(self, trainer: L.Trainer) -> None:
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
