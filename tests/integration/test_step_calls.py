"""A planned step takes few calls, in few files, and is not deep: a person can follow it.

the training's thread   Lightning's hooks, the module's Python, the start of the plan
other threads           the plan: the runner, its engine and the lanes
"""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import pytest
import torch
from support.offload_lightning import QUIET
from torch.utils.data import DataLoader, TensorDataset

from trainers import OffloadStrategy

ROOT = Path(__file__).parents[2]
PACKAGES = tuple(f"{ROOT / name}{os.sep}" for name in ("perfect", "loaders", "offload", "trainers"))
FIRST, LAST = 10, 14
"""The steps whose calls are counted. Their plan was made long before."""
STEPS = LAST - FIRST + 1

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]


class Calls:
    """The calls of our functions, by thread."""

    def __init__(self) -> None:
        self.of_training: list[str] = []
        self.of_others: list[str] = []
        self.depths: list[int] = []
        self._counts = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch this thread and those that it starts."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # pyright: ignore[reportArgumentType]

    def count(self, counts: bool) -> None:
        self._counts = counts

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if self._counts and event == "call" and frame.f_code.co_filename.startswith(PACKAGES):
            is_training = threading.current_thread() is threading.main_thread()
            calls = self.of_training if is_training else self.of_others
            calls.append(frame.f_code.co_filename)
            self.depths.append(sum(_is_ours(each) for each in _stack(frame)))


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(PACKAGES)


class CountedStep(L.Callback):
    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == FIRST:
            wait_for_kernels(trainer)
            self._calls.count(True)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == LAST:
            wait_for_kernels(trainer)
            self._calls.count(False)


def wait_for_kernels(trainer: L.Trainer) -> None:
    assert isinstance(trainer.strategy, OffloadStrategy)
    assert trainer.strategy.spent.runs


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


@pytest.fixture(scope="module")
def calls() -> Calls:
    data = TensorDataset(torch.randn(160, 64), torch.randint(10, (160,)))
    trainer = L.Trainer(
        strategy=OffloadStrategy(budget="80%"), accelerator="cpu", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[CountedStep(calls := Calls())],
    )  # fmt: skip
    with calls.watched():
        trainer.fit(Classifier(), DataLoader(data, batch_size=8))
    strategy = trainer.strategy
    assert isinstance(strategy, OffloadStrategy) and strategy.planned_steps == 20
    return calls


def test_a_step_takes_at_most_150_calls_in_20_files_of_the_trainings_thread(calls: Calls) -> None:
    assert 20 < len(calls.of_training) / STEPS <= 150
    assert len({*calls.of_training}) <= 20


def test_its_plan_takes_at_most_260_calls_in_24_files_of_other_threads(calls: Calls) -> None:
    """About eight for each of the plan's nodes, which lanes of their own run."""
    assert 20 < len(calls.of_others) / STEPS <= 260
    assert len({*calls.of_others}) <= 24


def test_no_call_is_deeper_than_15(calls: Calls) -> None:
    assert max(calls.depths) <= 15
