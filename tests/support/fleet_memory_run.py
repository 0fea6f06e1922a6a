"""A program: twelve jobs within a host budget; prints the most memory that they took.

All of them train to a rung of a stop rule, and wait there. So all that are there have trained.
"""

import logging
import re
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainers.fleet import Fleet, Halving

TRAINER = {"max_epochs": 1, "logger": False, "enable_checkpointing": False}


class Wide(L.LightningModule):
    """12 MiB of weights, 24 MiB of Adam's averages."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(3)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-3)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(12, 1024)), batch_size=2)


def memory(key: str) -> int:
    found = re.search(key + r":\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


def run(folder: Path, budget: str, jobs: int) -> int:
    """Return how many jobs had their memory at once."""
    most = 0

    def count(state: Any, event: Any) -> None:
        nonlocal most
        most = max(most, sum(job.plan.is_admitted and not job.ended for job in state.jobs.values()))

    options: dict[str, Any] = {"host_budget": budget, "folder": folder, "watch": count}
    fleet = Fleet("70%", "cpu", quantum=1, stop=Halving("loss", eta=2, first=3), **options)
    for number in range(jobs):
        fleet.add(f"job{number}", Wide, train=loader, trainer=TRAINER, seed=number)
    result = fleet.fit()
    assert {job.state for job in result.jobs.values()} <= {"finished", "stopped"}, result.table()
    return most


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder) / "first", "8GiB", 1)  # what is loaded once is nobody's
        before = memory("VmRSS")
        at_once = run(Path(folder) / "all", sys.argv[1], 12)
        print(memory("VmHWM") - before, at_once)
