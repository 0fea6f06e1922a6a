"""Texts of many lengths by YAML, under a budget: a few lengths, and a graph for each."""

import csv
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.nn import functional

from perfect.assembly.data import build_data
from perfect.assembly.run import build_module
from perfect.config.yaml_reader import read_config

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:.*captured and planned the .* 3 times")
Train = Callable[..., tuple[int, Path]]
Recipe = dict[str, Any]


@pytest.fixture(scope="module")
def lines(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same words, cut into lines of 3 to 15 of them."""
    root = tmp_path_factory.mktemp("lines")
    shutil.copytree(text / "gpt2_bpe", root / "gpt2_bpe")
    rng = np.random.default_rng(0)
    for part, most in (("train", 3000), ("valid", 300), ("test", 300)):
        words = (text / "wikitext-2" / f"wiki.{part}.tokens").read_text().split()[:most]
        cut: list[str] = []
        while words:
            count = int(rng.integers(3, 16))
            cut, words = [*cut, " ".join(words[:count])], words[count:]
        (root / f"{part}.txt").write_text("\n".join(cut))
    return root


def recipe(lines: Path, **data: Any) -> Recipe:
    found = yaml.safe_load((ROOT / "configs" / "gpt2" / "tiny.yaml").read_text())
    found["data"] = {"name": "lines", "root": str(lines), "sequence": 64, "vocabulary": 258, **data}
    found["loader"] = {"batch_size": 4, "drop_last": True}
    found["phases"][0]["steps"] = 60
    found["trainer"] |= {"threads": 1, "validate_every": 0.5}
    found["offload"] = {"budget": "70%"}
    return found


@pytest.mark.parametrize("lengths", ["auto", [32, 64]], ids=str)
def test_a_budget_plans_one_graph_a_length_and_the_loss_is_that_of_the_tokens(
    lengths: Any, lines: Path, train: Train, read_run: Callable[[Path], Recipe]
) -> None:
    code, folder = train(recipe(lines, lengths=lengths))
    run = read_run(folder)
    assert (code, run["status"], run["steps"]) == (0, "completed", 60)
    data = build_data(read_config(folder / "config.yaml")[0])
    padded = {batch[0].shape[1] for batch in data.train}
    assert padded if lengths == "auto" else padded <= {32, 64}
    plans = run["offload"]["plans"]
    steps = {plan["inputs"] for plan in plans if plan["part"] == "training_step"}
    assert 1 < len(steps) <= len(padded) < 8
    with (folder / "metrics.csv").open() as file:
        losses = [float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]
    assert losses[-1] < losses[0] - 0.5
    assert run["perplexity"] == pytest.approx(math.exp(by_hand(folder)), rel=1e-4)


def by_hand(folder: Path) -> float:
    """The mean loss a token of the test text, one line after the other, without padding."""
    config = read_config(folder / "config.yaml")[0]
    data = build_data(config)
    module = build_module(config, data.num_classes)
    saved = torch.load(folder / "final.ckpt", weights_only=False)
    module.load_state_dict(saved["state_dict"])
    module.eval()
    assert data.test is not None
    lines = data.test.dataset
    samples = [lines[number] for number in range(len(lines))]
    with torch.no_grad():
        found = [
            functional.cross_entropy(module(ids[None])[0], targets, reduction="none")
            for ids, targets in samples
        ]
    return float(torch.cat(found).mean())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"lengths": [32, 48]}, "lengths end with 48, and samples have up to 64"),
        ({"lengths": [64, 32]}, "in ascending order"),
        ({"lengths": "few"}, "give auto"),
        ({"lengths": []}, "give auto"),
        ({"sequence": 256}, "data.sequence: is 256, but gpt2_tiny has 128 positions"),
        ({"test_text": "raw"}, "test_text has no effect on lines"),
        ({"root": "nowhere"}, "data.root: nowhere"),
        ({"name": "wikitext2", "lengths": [64]}, "lengths has no effect on wikitext2"),
    ],
)
def test_what_does_not_fit_is_said_with_its_key(
    changed: Recipe, said: str, lines: Path, train: Train, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = recipe(lines)
    wrong["data"] |= changed
    assert train(wrong, "--check")[0] == 2
    assert said in capfd.readouterr().err
