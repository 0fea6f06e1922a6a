"""The program on tiny pictures: what a run leaves, and what it refuses."""

import csv
import errno
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from perfect.assembly import build_data, build_module
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


def test_a_folder_of_another_configuration_is_refused(
    train: Train, recipe: Recipe, capfd: pytest.CaptureFixture[str]
) -> None:
    _, folder = train(recipe)
    before = (folder / "run.json").read_bytes()
    recipe["phases"][0]["passes"] = 1
    code, _ = train(recipe)
    assert code == 2
    assert "phases.0.passes is 2 there, 1 here" in capfd.readouterr().err
    assert (folder / "run.json").read_bytes() == before


def test_a_folder_with_other_files_is_refused(
    train: Train, recipe: Recipe, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    assert train(recipe)[0] == 2
    assert "holds no run" in capfd.readouterr().err
    assert (tmp_path / "run" / "thesis.txt").read_text() == "mine"


def test_check_tells_what_would_run_and_leaves_nothing(
    train: Train, recipe: Recipe, capfd: pytest.CaptureFixture[str]
) -> None:
    code, folder = train(recipe, "--check")
    said = capfd.readouterr().out
    assert code == 0
    assert "steps 62; served 480; decodes 240 (50% fewer" in said
    assert "buffer" in said and "time unknown" in said
    assert not folder.exists()


def test_check_tells_the_memory_that_the_buffer_and_the_cache_may_take(
    train: Train, recipe: Recipe, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe["loader"] |= {"buffer_bytes": "1MiB", "cache": "ram", "cache_bytes": "24KiB"}
    assert train(recipe, "--check")[0] == 0
    said = capfd.readouterr().out
    # 16 x 16 pixels of 3 bytes and a label of 8: 776 bytes a sample.
    assert "buffer 12.1 KiB or less (2 batches of at most 8); with the batches under way" in said
    assert "decoded cache in RAM: at most 24.0 KiB, about 53% of the 45.5 KiB" in said


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


def test_a_backend_that_is_not_installed_is_refused_with_its_line(
    train: Train,
    recipe: Recipe,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    recipe["loader"]["backend"] = "dali"
    assert train(recipe)[0] == 2
    said = capfd.readouterr().err
    assert "recipe.yaml:" in said
    assert "loader.backend: the dali backend needs NVIDIA DALI" in said


def test_check_estimates_the_time_once_it_is_measured(
    train: Train, recipe: Recipe, capfd: pytest.CaptureFixture[str]
) -> None:
    train(recipe)
    train(recipe, "--check")
    assert "as measured over 62 steps" in capfd.readouterr().out


def test_the_budget_rule_works_out_the_passes(
    train: Train, recipe: Recipe, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe["switch"] = {"rule": "budget", "fresh_passes": 12, "total": 20}
    for phase in recipe["phases"]:
        del phase["passes"]
    assert train(recipe, "--check")[0] == 0
    # f = (3 * 12 - 20) / 2 = 8, N = 4
    assert "steps 156;" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data": {"root": "/nowhere/at/all"}}, "data.root: no folder"),
        ({"loader": {"batch_size": 4000}}, "loader.batch_size: 4000 is larger than the training"),
        ({"data": {"holdout": 500}}, "data.holdout: is 500, but there are 72 training samples"),
        ({"data": {"train_samples": 100}}, "data.train_samples: is 100, but there are 60 samples"),
        (
            {"augment": [{"name": "random_resized_crop", "size": 20}]},
            "augment.0.size: 20 is larger",
        ),
        (
            {"loader": {"buffer_bytes": "20KiB"}},
            "loader.buffer_bytes: 20.0 KiB is too small: a batch of 8 in the buffer and 4 under"
            " way take 31040 bytes",
        ),
        ({"augment": [{"name": "pad_crop", "padding": 16}]}, "augment.0.padding: 16 must be less"),
        ({"optimizer": {"momentum": 0.0, "nesterov": True}}, "nesterov needs momentum"),
        ({"model": {"num_classes": 2}}, "model.num_classes: is 2, but the data has 3 classes"),
    ],
)
def test_what_the_data_cannot_bear_is_refused_with_its_line(
    train: Train,
    recipe: Recipe,
    change: dict[str, Any],
    said: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for section, values in change.items():
        recipe[section] = recipe.get(section, {}) | values if isinstance(values, dict) else values
    code, folder = train(recipe)
    error = capfd.readouterr().err
    assert code == 2
    assert said in error
    assert "recipe.yaml:" in error
    assert "Traceback" not in error
    assert not folder.exists()


def test_an_empty_folder_and_a_single_class_are_refused(
    train: Train, recipe: Recipe, pictures: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe["data"]["root"] = str(tmp_path / "data")
    (tmp_path / "data" / "train").mkdir(parents=True)
    assert train(recipe)[0] == 2
    assert "no pictures under" in capfd.readouterr().err
    shutil.copytree(pictures / "train" / "red", tmp_path / "data" / "train" / "red")
    assert train(recipe)[0] == 2
    assert "only one class" in capfd.readouterr().err


def test_an_unreadable_picture_stops_the_run_and_is_named(
    train: Train,
    recipe: Recipe,
    pictures: Path,
    tmp_path: Path,
    read_run: ReadRun,
    capfd: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(pictures, tmp_path / "data")
    broken = tmp_path / "data" / "train" / "red" / "003.jpg"
    broken.write_bytes(broken.read_bytes()[:200])
    recipe["data"] |= {"root": str(tmp_path / "data"), "holdout": 0}
    code, folder = train(recipe)
    assert code == 1
    assert "red/003.jpg" in capfd.readouterr().err
    assert read_run(folder)["status"] == "failed"
    assert "red/003.jpg" in read_run(folder)["error"]


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(
    train: Train, recipe: Recipe, read_run: ReadRun, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe["phases"][1]["lr"] = {"kind": "constant", "lr": 1e30}
    code, folder = train(recipe)
    assert code == 1
    assert "the loss was nan at step 4" in capfd.readouterr().err.replace("inf", "nan")
    assert read_run(folder)["status"] == "failed"
    saved = torch.load(folder / "last.ckpt", weights_only=False)
    assert 0 < saved["global_step"] < 50
    assert all(t.isfinite().all() for t in saved["state_dict"].values())


def test_a_full_disk_leaves_the_previous_checkpoint_whole(
    train: Train,
    recipe: Recipe,
    monkeypatch: pytest.MonkeyPatch,
    read_run: ReadRun,
    capfd: pytest.CaptureFixture[str],
) -> None:
    synced: list[int] = []

    def fsync_until_full(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync_until_full)
    code, folder = train(recipe)
    assert code == 0
    assert len(synced) > 3
    assert "could not write checkpoint" in capfd.readouterr().err.replace("\n", " ")
    assert torch.load(folder / "last.ckpt", weights_only=False)["global_step"] < 20
    assert not list(folder.glob("*.part"))
    assert read_run(folder)["status"] == "completed"


def test_a_logger_that_is_not_installed_is_refused(
    train: Train,
    recipe: Recipe,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("perfect.assembly.run.find_spec", lambda name: None)
    recipe["loggers"] = ["wandb"]
    code, folder = train(recipe)
    assert code == 2
    assert "loggers: 'wandb' is not installed: pip install wandb" in capfd.readouterr().err
    assert not folder.exists()


def test_tensorboard_and_lightning_s_csv_are_written_on_request(
    train: Train, recipe: Recipe
) -> None:
    recipe["loggers"] = ["csv", "tensorboard"]
    code, folder = train(recipe)
    assert code == 0
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    assert list((folder / "lightning_csv").rglob("metrics.csv"))


def test_a_damaged_checkpoint_is_refused_and_left_alone(
    train: Train, recipe: Recipe, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe["phases"][1]["lr"] = {"kind": "constant", "lr": 1e30}
    _, folder = train(recipe)
    (folder / "last.ckpt").write_bytes(b"not a checkpoint")
    code, _ = train(recipe)
    assert code == 2
    assert "last.ckpt is damaged" in capfd.readouterr().err
    assert (folder / "last.ckpt").read_bytes() == b"not a checkpoint"


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


OWN_MODULE_ON_PICTURES = """
import lightning as L, torch
from torch import nn

class Plain(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(768, 3))
    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x.float() / 255), y)
    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_accuracy", (self.net(x.float() / 255).argmax(1) == y).float().mean())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)
"""


def test_an_own_module_without_a_test_step_is_judged_by_its_validation_step(
    train: Train,
    recipe: Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    read_run: ReadRun,
) -> None:
    (tmp_path / "own_pictures.py").write_text(OWN_MODULE_ON_PICTURES)
    monkeypatch.chdir(tmp_path)
    recipe["model"] = {"class_path": "own_pictures.Plain"}
    code, folder = train(recipe)
    run = read_run(folder)
    assert code == 0
    assert run["status"] == "completed"
    assert run["accuracy_on"] == "test"
    assert run["accuracy"] > 0.5


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            {"class_path": "nowhere.MyModule"},
            "model.class_path: 'nowhere.MyModule' cannot be imported",
        ),
        ({"class_path": "collections.OrderedDict"}, "is not a lightning.LightningModule"),
    ],
)
def test_an_own_class_that_cannot_be_used_is_refused(
    train: Train,
    recipe: Recipe,
    model: dict[str, Any],
    said: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    recipe["model"] = model
    assert train(recipe)[0] == 2
    assert said in capfd.readouterr().err
