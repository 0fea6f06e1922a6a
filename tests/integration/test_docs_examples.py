"""The examples of docs/offload.md run as they are shown; the YAML of README.md is read."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from perfect.config.yaml_reader import read_config

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "offload.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def block_with(words: str) -> str:
    (found,) = [block for block in BLOCKS if words in block]
    return found


def test_the_first_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    module = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    inputs, targets = torch.randn(8, 4), torch.randint(2, (8,))
    loss_fn = nn.CrossEntropyLoss()
    before = loss_fn(module(inputs), targets).item()
    given: dict[str, Any] = {
        "module": module,
        "loss_fn": loss_fn,
        "optimizer": optimizer,
        "inputs": inputs,
        "targets": targets,
        "loader": [(inputs, targets)] * 3,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0),
        "print": lambda *_: None,
    }
    exec(block_with("capture_training_step"), given)
    assert loss_fn(module(inputs), targets).item() < before
    assert (tmp_path / "memory.svg").stat().st_size and (tmp_path / "trace.json").stat().st_size


def test_the_graph_by_hand_adds_one_and_sends_it() -> None:
    given: dict[str, Any] = {"offload": offload, "torch": torch}
    exec(block_with("offload.GraphBuilder()"), given)
    assert torch.equal(given["z"], torch.ones(4096, dtype=torch.uint8))


def test_the_readmes_yaml_is_one(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```yaml\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    (tmp_path / "run.yaml").write_text(shown, encoding="utf-8")
    config, _ = read_config(tmp_path / "run.yaml")
    assert [phase.name for phase in config.phases] == ["pretrain", "finetune"]
    assert config.offload is not None and config.offload.budget
