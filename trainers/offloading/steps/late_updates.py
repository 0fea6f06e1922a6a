"""The last updates of a step may run in the next step's forward pass, while nobody reads weights.

    run ---- first ---- steady ---- steady ---- flush       (offload/running/rotated_step.py)
              pending    pending     pending    at validation, a checkpoint, an epoch's end,
                                                another batch shape, a reader between two steps

Only the step that is planned first is rotated in this way, and only if an optimizer step is one
batch.
"""

from collections.abc import Callable
from typing import Any

import lightning as L
import torch

from offload import BudgetTooSmall, Runner, TaskGraph
from offload.lowering.rotation import Rotation
from offload.running.rotated_step import RotatedStep
from trainers.offloading.observers.weight_readers import WeightReaders


class LateUpdates:
    """Defers the last updates of one fit's steps, and runs them before anybody reads weights."""

    def __init__(self, module: L.LightningModule) -> None:
        self._trainer = module.trainer
        self._readers = WeightReaders(module)
        self._callback = FlushingCallback(self.flush)
        self._rotated: RotatedStep | None = None
        self._step: Any = None
        self._running = False

    def why_not(self) -> str:
        """Say why no update may be deferred now; empty if updates may."""
        micro_batches = self._trainer.accumulate_grad_batches
        if micro_batches != 1:
            return (
                f"accumulate_grad_batches={micro_batches}: the next micro-batch is not a whole step"
            )
        return self._readers.first()

    @staticmethod
    def key(step: Any) -> Any:
        """Return the runner's key of the rotated step. The key of the plain step is `step`."""
        return (step, "turned")

    def begin(self, runner: Runner, rotation: Rotation, step: Any, graph: TaskGraph) -> bool:
        """Add the plain step and the flush to the runner; False if there is no room for them."""
        try:
            runner.add(step, graph)
            self._rotated = RotatedStep(runner, rotation, self.key(step))
        except BudgetTooSmall:
            return False
        self._step = step
        return True

    def run(self, runner: Runner, step: Any, *tensors: torch.Tensor, wait: bool) -> tuple[Any, ...]:
        """Run a step. `wait`: the strategy knows of nothing but a training step that comes next."""
        if not wait or self._rotated is None or step is not self._step or self.why_not():
            self.flush()
            return runner.run(step, *tensors)
        self._callback.attach(self._trainer)
        self._running = True
        try:
            return self._rotated.run(*tensors)
        finally:
            self._running = False

    def flush(self) -> None:
        """Run the pending updates, because somebody may read the weights now. (A signal handler
        that calls this in mid-step changes nothing: the step is not over.)"""
        if self._rotated is not None and not self._running:
            self._rotated.flush()

    def forget(self, step: Any) -> None:
        """Run the pending updates of this step, which leaves the cache."""
        if self._rotated is not None and step is self._step:
            self.flush()
            self._rotated.forget()
            self._rotated = None

    def abandon(self) -> None:
        """Drop the pending updates: the device is lost."""
        self._rotated = None
        self._callback.detach(self._trainer)

    def end(self) -> None:
        """Run the pending updates at the end of the fit."""
        try:
            self.flush()
        finally:
            self._rotated = None
            self._callback.detach(self._trainer)


class FlushingCallback(L.Callback):
    """Comes first at each hook where other callbacks may read the weights of one fit, and calls
    `flush`. Checkpoints in mid-epoch go through the strategy, which runs the late updates too."""

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
