"""The program on tiny pictures: what a run leaves, and what it tells."""

import csv
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
import yaml
from torch.utils.data import DataLoader, TensorDataset

from perfect.assembly.data import build_data
from perfect.assembly.run import build_module
from perfect.config.yaml_reader import read_config

Train = Callable[..., tuple[int, Path]]
Recipe = dict[str, Any]
ReadRun = Callable[[Path], dict[str, Any]]

RUN_KEYS = {
    "status", "seed", "accuracy", "best_accuracy", "steps", "wall_seconds", "stall_seconds",
    "decoded_samples", "served_samples", "fresh_passes", "phases", "environment", "config",
}  # fmt: skip
PHASE_KEYS = {
    "name", "passes", "reuse", "first_step", "last_step", "decoded", "lr_start", "lr_end", "reason",
}  # fmt: skip


def test_a_run_leaves_everything_that_is_promised(
    train: Train, recipe: Recipe, read_run: ReadRun
) -> None:
    code, folder = train(recipe)
    run = read_run(folder)

    assert code == 0
    assert run["status"] == "completed"
    assert run.keys() >= RUN_KEYS
    assert all(phase.keys() >= PHASE_KEYS for phase in run["phases"])
    # 60 pictures, batches of 8: 23 steps a pass of 3 serves, 8 steps a fresh pass.
    assert run["steps"] == 2 * 23 + 2 * 8
    assert run["decoded_samples"] == 4 * 60
    assert run["served_samples"] == 2 * 180 + 2 * 60
    assert run["fresh_passes"] == 4
    assert [(p["name"], p["first_step"], p["last_step"]) for p in run["phases"]] == [
        ("pretrain", 0, 45),
        ("finetune", 46, 61),
    ]
    assert run["accuracy"] > 0.6  # three colours: chance is 0.33
    assert "phases" in (folder / "report.html").read_text()
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {"train_loss", "val_accuracy", "lr", "decoded", "stall_seconds"} <= rows[0].keys()
    assert yaml.safe_load((folder / "config.yaml").read_text()) == run["config"]


def test_the_final_checkpoint_holds_the_weights_that_were_judged(
    train: Train, recipe: Recipe, read_run: ReadRun
) -> None:
    _, folder = train(recipe)
    saved = torch.load(folder / "final.ckpt", weights_only=False)
    config = read_config(folder / "config.yaml")[0]
    data = build_data(config)
    module = build_module(config, data.num_classes)
    module.load_state_dict(saved["state_dict"])
    module.eval()
    assert data.test is not None
    with torch.no_grad():
        right = [module(x).argmax(1) == y for x, y in data.test]
    accuracy = float(torch.cat(right).float().mean())
    assert saved["global_step"] == read_run(folder)["steps"]
    assert accuracy == pytest.approx(read_run(folder)["accuracy"], abs=1e-6)


def test_nobody_trains_on_the_holdout(recipe: Recipe, write_yaml: Callable[..., Path]) -> None:
    recipe["data"] |= {"holdout": 12, "train_samples": 40}
    data = build_data(read_config(write_yaml(recipe))[0])
    assert data.holdout is not None
    held = set(data.holdout.dataset.indices)
    learned = set(data.train.dataset.indices)
    assert (len(learned), len(held), learned & held) == (40, 12, set())


def test_the_same_seed_gives_the_same_run(
    train: Train, recipe: Recipe, outcome: Callable[[Path], Any]
) -> None:
    _, one = train(recipe, out="one")
    recipe["loader"]["workers"] = 1
    _, two = train(recipe, out="two")
    assert outcome(one) == outcome(two)


def test_a_finished_folder_is_left_alone(
    train: Train, recipe: Recipe, capfd: pytest.CaptureFixture[str]
) -> None:
    _, folder = train(recipe)
    before = (folder / "run.json").read_bytes()
    code, _ = train(recipe)
    assert code == 0
    assert "is complete" in capfd.readouterr().err
    assert (folder / "run.json").read_bytes() == before


def test_check_tells_what_would_run_and_leaves_nothing(
    train: Train, recipe: Recipe, capfd: pytest.CaptureFixture[str]
) -> None:
    code, folder = train(recipe, "--check")
    said = capfd.readouterr().out
    assert code == 0
    assert "steps 62; served 480; decodes 240 (50.0 % fewer" in said
    assert "buffer" in said and "time unknown" in said
    assert not folder.exists()


class Downloads(L.LightningDataModule):
    """Its data is there after `prepare_data` only."""

    prepared: ClassVar[list[str]] = []

    def prepare_data(self) -> None:
        self.prepared.append("once")

    def setup(self, stage: str) -> None:
        if not self.prepared:
            raise FileNotFoundError("there is no data yet")

    def train_dataloader(self) -> Any:
        pictures = torch.zeros(16, 3, 8, 8, dtype=torch.uint8)
        return DataLoader(TensorDataset(pictures, torch.zeros(16, dtype=torch.long)), 8)


def test_check_downloads_nothing(
    train: Train, recipe: Recipe, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Downloads, "prepared", [])
    monkeypatch.setitem(sys.modules, "own_data", SimpleNamespace(Downloads=Downloads))
    recipe["data"] = {"class_path": "own_data.Downloads"}
    recipe["model"]["num_classes"] = 2
    del recipe["augment"]
    assert train(recipe, "--check")[0] == 2
    said = " ".join(capfd.readouterr().err.split())
    assert "its setup() fails (FileNotFoundError: there is no data yet)" in said
    assert "--check downloads nothing" in said
    assert not Downloads.prepared
    assert train(recipe)[0] == 0
    assert Downloads.prepared
    # A data set in memory is not decoded, so nobody claims that decodes were saved.
    assert train(recipe, "--check", out="again")[0] == 0
    said = capfd.readouterr().out
    assert "first serves 64; the data set is in memory, so nothing is decoded" in said


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_a_run_with_a_cache_decodes_each_sample_once_and_learns_the_same(
    kind: str, train: Train, recipe: Recipe, read_run: ReadRun, tmp_path: Path
) -> None:
    run = read_run(train(recipe, out="plain")[1])
    recipe["loader"] |= {"cache": kind, "cache_bytes": "1MiB"}
    if kind == "disk":
        recipe["loader"]["cache_dir"] = str(tmp_path / "kept")
    code, folder = train(recipe, out="cached")
    cached = read_run(folder)
    assert code == 0
    assert (run["decoded_samples"], run["cached_samples"]) == (240, 0)
    assert cached["decoded_samples"] + cached["cached_samples"] == 240
    assert cached["decoded_samples"] == 60
    assert cached["accuracy"] == run["accuracy"]
    assert "First served from the decoded cache" in (folder / "report.html").read_text()


def test_a_run_that_may_skip_tells_how_many_pictures_could_not_be_read(
    train: Train, recipe: Recipe, read_run: ReadRun, pictures: Path, tmp_path: Path
) -> None:
    shutil.copytree(pictures, tmp_path / "data")
    broken = tmp_path / "data" / "train" / "red" / "003.jpg"
    broken.write_bytes(broken.read_bytes()[:200])
    recipe["data"] |= {"root": str(tmp_path / "data"), "holdout": 0}
    recipe["loader"]["on_error"] = "skip"
    code, folder = train(recipe)
    assert code == 0
    assert read_run(folder)["skipped_samples"] == 1
    said = "Samples that others replaced, as they could not be read: 1."
    assert said in (folder / "report.html").read_text()


def test_the_budget_rule_works_out_the_passes(
    train: Train, recipe: Recipe, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe["switch"] = {"rule": "budget", "fresh_passes": 12, "total": 20}
    for phase in recipe["phases"]:
        del phase["passes"]
    assert train(recipe, "--check")[0] == 0
    # f = (3 * 12 - 20) / 2 = 8, N = 4
    assert "steps 156;" in capfd.readouterr().out


def test_tensorboard_and_lightning_s_csv_are_written_on_request(
    train: Train, recipe: Recipe
) -> None:
    recipe["loggers"] = ["csv", "tensorboard"]
    code, folder = train(recipe)
    assert code == 0
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    assert list((folder / "lightning_csv").rglob("metrics.csv"))


OWN_CODE = """
import lightning as L, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class MyData(L.LightningDataModule):
    def __init__(self, count):
        super().__init__()
        x = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
        self.data = TensorDataset(x, (x.sum(1) > 0).long())
    def train_dataloader(self):
        return DataLoader(self.data, batch_size=3)
    def val_dataloader(self):
        return DataLoader(self.data, batch_size=16)

class MyModule(L.LightningModule):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))
    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)
    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_accuracy", (self.net(x).argmax(1) == y).float().mean())
    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches == 24 + 8, "honest for schedulers"
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""


def test_own_module_and_own_data_run_from_the_yaml(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_run: ReadRun
) -> None:
    (tmp_path / "own_code.py").write_text(OWN_CODE)
    monkeypatch.chdir(tmp_path)
    recipe = {
        "model": {"class_path": "own_code.MyModule", "init_args": {"width": 8}},
        "data": {"class_path": "own_code.MyData", "init_args": {"count": 32}},
        "loader": {"batch_size": 8},
        "phases": [
            {"name": "pretrain", "passes": 2, "reuse": 3},
            {"name": "finetune", "passes": 2, "lr": {"kind": "linear", "lr": 0.5}},
        ],
        "trainer": {"accelerator": "cpu"},
    }
    code, folder = train(recipe)
    run = read_run(folder)
    assert code == 0
    assert run["steps"] == 32
    assert run["decoded_samples"] == 4 * 32
    assert run["accuracy_on"] == "holdout"
    assert run["accuracy"] > 0.7
    assert run["phases"][1]["lr_start"] == pytest.approx(0.5 * (1 - 0.5 / 8))
