"""A search over the jobs of a real fleet: jobs that end, fail and are pruned; a kill in between."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainers.fleet import Fleet, FleetResult
from trainers.fleet.search import OptunaPruner, OptunaSearch

optuna = pytest.importorskip("optuna")
pytestmark = pytest.mark.filterwarnings(
    "ignore:The '.*_dataloader' does not have many workers", "ignore:All-NaN slice"
)
STEPS_OF_A_PASS, PASSES = 4, 4


class Line(L.LightningModule):
    """Learns a line. Its weights are drawn when it is made."""

    def __init__(self, lr: float, width: int) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))

    def _loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr)


def make(params: Mapping[str, Any]) -> dict[str, Any]:
    if params["width"] == 3:
        raise ValueError("three is no width")
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return {
        "module": Line(**params),
        "train": DataLoader(data, 32 // STEPS_OF_A_PASS, shuffle=True),
        "val": DataLoader(data, 32),
        "trainer": {"max_epochs": PASSES, "enable_checkpointing": False, "logger": False},
    }


SPACE = {
    "lr": optuna.distributions.FloatDistribution(1e-4, 1.0, log=True),
    "width": optuna.distributions.CategoricalDistribution([2, 3, 8]),
}


def search_of(folder: Path) -> OptunaSearch:
    rule = OptunaPruner(
        optuna.pruners.MedianPruner(n_startup_trials=2), "val_loss", every=STEPS_OF_A_PASS
    )
    fleet = Fleet("64KiB", "cpu", stop=rule, quantum=3, folder=folder)
    sampler = optuna.samplers.TPESampler(seed=0, n_startup_trials=3)
    return OptunaSearch(fleet, sampler, SPACE, make, trials=7, at_once=2)


def killed(whole: Path, folder: Path, share: float) -> Path:
    """What is left of a fleet that was killed so far on: no job has written a checkpoint yet."""
    lines = (whole / "journal.jsonl").read_text().splitlines(keepends=True)
    folder.mkdir()
    (folder / "journal.jsonl").write_text("".join(lines[: int(share * len(lines))]) + '{"ev')
    return folder


def said(search: OptunaSearch, result: FleetResult) -> list[Any]:
    return [
        (t.params, t.state.name, t.value, repr(t.intermediate_values), result.jobs[job].state)
        for t, job in zip(search.study.trials, sorted(result.jobs), strict=True)
    ]


def test_jobs_end_fail_and_are_pruned_and_a_killed_search_goes_on_with_the_same_ones(
    tmp_path: Path,
) -> None:
    whole = search_of(tmp_path / "whole")
    result = whole.fit()
    states = {t.state.name for t in whole.study.trials}
    assert states == {"COMPLETE", "FAIL", "PRUNED"}
    assert {job.state for job in result.jobs.values()} == {"finished", "failed", "stopped"}
    assert result.best == f"trial-{whole.study.best_trial.number:04}"
    assert len(result.jobs) == 7
    for trial in whole.study.trials:
        failed = trial.params["width"] == 3
        assert failed == (trial.state.name == "FAIL")
        if failed:
            assert trial.user_attrs["why"] == "ValueError: three is no width"
    again = search_of(killed(tmp_path / "whole", tmp_path / "killed", 0.6))
    assert said(again, again.fit()) == said(whole, result)
