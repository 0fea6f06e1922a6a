"""A fleet on one GPU: each job has the bits that it has alone, updates on the host included."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest

from benchmarks.jobs.fleet_jobs import BUDGET, KINDS, QUIET, Outcome, add
from trainers import OffloadStrategy
from trainers.fleet import Fleet

pytestmark = [
    pytest.mark.gpu,
    *[pytest.mark.filterwarnings(line) for line in QUIET],
]
UPDATES = {"adam": "device", "sgd": "device", "clipped": "host"}
"""Where the updates of each job run. `auto` decides by the clock, which differs from run to run."""


@pytest.mark.parametrize("quantum", [1, None])
def test_jobs_of_a_gpu_are_what_they_are_alone(quantum: int | None, tmp_path: Path) -> None:
    fleet = Fleet(BUDGET, ["cuda:0"], metric="val_loss", quantum=quantum, folder=tmp_path)
    lone: dict[str, Outcome] = {}
    modules: dict[str, Any] = {}
    for name, updates in UPDATES.items():
        kind = KINDS[name]
        trainer = {**kind.trainer, "deterministic": True}
        module = kind.module()
        strategy = OffloadStrategy(budget=BUDGET, optimizer=updates)
        L.Trainer(
            **trainer, strategy=strategy, accelerator="gpu", devices=[0],
            enable_progress_bar=False, enable_model_summary=False,
        ).fit(module, kind.train(), kind.val())  # fmt: skip
        lone[name] = Outcome.of(module)
        modules[name] = add(fleet, name, kind, trainer=trainer, offload={"optimizer": updates})
    result = fleet.fit()
    assert {job.state for job in result.jobs.values()} == {"finished"}, result.table()
    found = {name: lone[name].differences(Outcome.of(modules[name])) for name in UPDATES}
    assert found == {name: [] for name in UPDATES}
