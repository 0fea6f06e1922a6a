"""`trainer: {devices: 2}` and `offload:` in one YAML: what comes of a run is plain DDP's."""

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

CLOCKS = ("wall_seconds", "stall_seconds")


def trained(config: Path, folder: Path) -> list[dict[str, str]]:
    """What is logged, but for what a clock says."""
    command = [sys.executable, "-m", "perfect.train", str(config), "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    with (folder / "metrics.csv").open() as file:
        return [{k: v for k, v in row.items() if k not in CLOCKS} for row in csv.DictReader(file)]


@pytest.mark.full
@pytest.mark.timeout(620)
def test_two_ranks_within_a_budget_learn_what_they_learn_without_to_the_bit(
    recipe: dict[str, Any], write_yaml: Callable[..., Path], tmp_path: Path
) -> None:
    recipe["trainer"] |= {"devices": 2, "accumulate": 2, "gradient_clip": 0.5}
    plain = trained(write_yaml(recipe, "plain.yaml"), tmp_path / "plain")
    recipe["offload"] = {"budget": "70%"}
    offloaded = trained(write_yaml(recipe, "offload.yaml"), tmp_path / "offload")
    assert len(plain) > 3
    assert offloaded == plain
    states = [
        torch.load(tmp_path / run / "final.ckpt", weights_only=False)["state_dict"]
        for run in ("plain", "offload")
    ]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    told = json.loads((tmp_path / "offload" / "run.json").read_text())
    assert told["offload"]["runs"] > 10
