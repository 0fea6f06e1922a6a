"""What a run leaves in its folder, and a stop for which nothing is left."""

import csv
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from perfect.runs.checkpoint import RunCheckpoint


def logged(folder: Path) -> list[dict[str, str]]:
    """All that was logged but for what a clock says: texts, so that nothing is rounded."""
    clocks = ("wall_seconds", "stall_seconds")
    with (folder / "metrics.csv").open() as file:
        return [{k: v for k, v in row.items() if k not in clocks} for row in csv.DictReader(file)]


def stop_after(step: int, patch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C that no checkpoint is written for."""
    before = RunCheckpoint.on_train_batch_end

    def on_train_batch_end(self: RunCheckpoint, trainer: L.Trainer, *more: Any) -> None:
        before(self, trainer, *more)
        if trainer.global_step == step:
            raise KeyboardInterrupt

    patch.setattr(RunCheckpoint, "on_train_batch_end", on_train_batch_end)
