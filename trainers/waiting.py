"""Updates of a fit that wait for the next forward pass, where nobody can see it.

    run ---- first ---- steady ---- steady ---- flush       (offload/late.py)
              pending    pending     pending    whole: validation, checkpoint, epoch's end, another
                                                       batch shape, a reader between two steps

Only the step that is planned first is turned, and only where an optimizer step is one batch.
"""

from typing import Any

import lightning as L
import torch

from offload import BudgetTooSmall, Runner, TaskGraph
from offload.late import Late
from offload.lowering.late_updates import Rotation
from trainers.readers import Readers
from trainers.whole import Whole


class Waiting:
    """Of one fit."""

    def __init__(self, module: L.LightningModule) -> None:
        self._trainer = module.trainer
        self._readers = Readers(module)
        self._whole = Whole(self.flush)
        self._late: Late | None = None
        self._step: Any = None
        self._running = False

    def why_not(self) -> str:
        """Why no update may wait now; empty: they may."""
        micro_batches = self._trainer.accumulate_grad_batches
        if micro_batches != 1:
            return f"accumulate_grad_batches={micro_batches}: what comes next is no whole step"
        return self._readers.first()

    @staticmethod
    def key(step: Any) -> Any:
        """What the runner calls the turned step; the step itself is the one that is not."""
        return (step, "turned")

    def begin(self, runner: Runner, rotation: Rotation, step: Any, graph: TaskGraph) -> bool:
        """Whether there is room for all that is needed besides."""
        try:
            runner.add(step, graph)
            self._late = Late(runner, rotation, self.key(step))
        except BudgetTooSmall:
            return False
        self._step = step
        return True

    def run(self, runner: Runner, step: Any, *tensors: torch.Tensor, wait: bool) -> tuple[Any, ...]:
        """`wait`: nothing but the next training step comes now, as far as the strategy knows."""
        if not wait or self._late is None or step is not self._step or self.why_not():
            self.flush()
            return runner.run(step, *tensors)
        self._whole.stand_in(self._trainer)
        self._running = True
        try:
            return self._late.run(*tensors)
        finally:
            self._running = False

    def flush(self) -> None:
        """Somebody may look now. (Who asks in mid-step, from a signal's handler, finds tensors
        between two steps, as ever.)"""
        if self._late is not None and not self._running:
            self._late.flush()

    def forget(self, step: Any) -> None:
        """It is not kept."""
        if self._late is not None and step is self._step:
            self.flush()
            self._late.forget()
            self._late = None

    def abandon(self) -> None:
        """What waits is lost."""
        self._late = None
        self._whole.leave(self._trainer)

    def end(self) -> None:
        try:
            self.flush()
        finally:
            self._late = None
            self._whole.leave(self._trainer)
