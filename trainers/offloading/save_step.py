"""Saves a step of a Lightning fit to a file, which `perfect-step replay` and `bisect` read.

Trainer(strategy=OffloadStrategy(...), callbacks=[SaveStep("step.pt", step=120)])
"""

from pathlib import Path
from typing import Any

import lightning as L
import torch

from offload import OffloadError
from offload.live.session import LiveSession
from offload.replaying.saving import save_part
from offload.replaying.step_file import SavedPart, SavedStep, write_step
from trainers.offloading.strategy import OffloadStrategy
from trainers.steps.step_planner import EVALUATIONS


class SaveStep(L.Callback):
    """Saves the step after which the trainer has made `step` steps."""

    def __init__(self, path: str | Path, step: int, *, data: bool = True) -> None:
        """`data`: whether the file has the weights, the states and the batch. Without them a replay
        makes up small numbers."""
        if step < 1:
            raise ValueError(f"step={step} is no step: the first one is 1")
        self.path, self.step = Path(path), step
        self.written = False
        self._data = data
        self._parts: list[SavedPart] = []
        self._budget: Any = None

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step == self.step - 1 and not self.written:
            _planned_strategy(trainer).watch_parts(self._save)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step < self.step or self.written or not self._parts:
            return
        _planned_strategy(trainer).watch_parts(None)
        title = f"step {self.step} of {type(trainer.lightning_module).__name__}"
        write_step(self.path, SavedStep(title, self._budget, self._parts, torch.get_num_threads()))
        self.written, self._parts = True, []

    def _save(self, session: LiveSession, tape: Any, held: set[int]) -> None:
        if session.name not in EVALUATIONS:
            self._budget = session.plans.budget_bytes
            part = save_part(session, tape, held)
            self._parts.append(part if self._data else part.without_data())


def _planned_strategy(trainer: L.Trainer) -> OffloadStrategy:
    strategy = trainer.strategy
    if not isinstance(strategy, OffloadStrategy):
        raise OffloadError(
            f"SaveStep saves steps of OffloadStrategy, not of {type(strategy).__name__}:"
            " give Trainer(strategy=OffloadStrategy())"
        )
    return strategy
