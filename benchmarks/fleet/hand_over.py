"""From the last line of one job to the first line of the next: random state, decision, journal.

Both jobs are plain Lightning on the CPU, so nothing is parked.
"""

import statistics
import tempfile
from itertools import pairwise
from time import perf_counter
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness.command import Options
from benchmarks.harness.report import Report, Target, format_table
from trainers.fleet import Fleet
from trainers.random_state import RandomState


class Stamped(L.LightningModule):
    """Notes when its turn is over and when the next one begins."""

    def __init__(self, name: str, stamps: list[tuple[float, str, str]]) -> None:
        super().__init__()
        self.name, self.stamps = name, stamps
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.stamps.append((perf_counter(), self.name, "before"))  # just before the hand-over
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.stamps.append((perf_counter(), self.name, "after"))  # just after it

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def measure(options: Options) -> Report:
    smoke = options.smoke
    steps = 20 if smoke else 500
    stamps: list[tuple[float, str, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(None, "cpu", quantum=1, folder=folder)
        for name in ("a", "b"):
            fleet.add(
                name,
                Stamped(name, stamps),
                train=DataLoader(TensorDataset(torch.zeros(steps, 4)), batch_size=1),
                trainer={"max_epochs": 1, "logger": False, "enable_checkpointing": False},
                offload=False,
            )
        fleet.fit()
    cpu = torch.device("cpu")
    took = [
        1e3 * (later - earlier)
        for (earlier, one, said), (later, other, then) in pairwise(stamps)
        if (said, then) == ("before", "after") and one != other
    ]
    dice = []
    for _ in range(200):
        begun = perf_counter()
        RandomState.capture(cpu).restore(cpu)
        dice.append(1e3 * (perf_counter() - begun))
    took = took or [float("nan")]
    report = Report("hand_over", "a hand-over costs at most a millisecond", {"steps": steps})
    report.rows = [{"milliseconds": took, "dice_milliseconds": dice}]
    lines = [
        [
            what,
            f"{statistics.median(ms):.3f}",
            f"{sorted(ms)[int(0.9 * len(ms))]:.3f}",
            str(len(ms)),
        ]
        for what, ms in (("hand-over", took), ("of it, keeping and rolling dice", dice))
    ]
    report.tables["milliseconds"] = format_table(["what", "median", "90 %", "count"], lines)
    report.asked = [Target("hand-over, nothing parked", 1.0, statistics.median(took), "ms")]
    return report
