"""The first Ctrl-C (or SIGTERM) asks for a checkpoint; the second one stops at once.

This holds only while training runs. Before and after it there is nothing to save, and Python's own
handlers are used.
"""

import signal
from types import FrameType
from typing import Any

import lightning as L
from rich.console import Console

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignal(L.Callback):
    """Receives signals. RunCheckpoint calls `is_requested()` after each batch."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._requested = False
        self._before: list[Any] = []

    def is_requested(self) -> bool:
        return self._requested

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Lightning installs its own SIGTERM handler when fit() begins, so ours comes after it.
        self._before = [signal.signal(number, self._receive) for number in SIGNALS]

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._restore()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in zip(SIGNALS, self._before, strict=False):
            signal.signal(number, handler)
        self._before = []

    def _receive(self, _number: int, _frame: FrameType | None) -> None:
        if self._requested:
            raise KeyboardInterrupt
        self._requested = True
        self._console.print("stopping after a checkpoint (press Ctrl-C again to stop at once)")
