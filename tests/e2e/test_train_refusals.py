"""What the program refuses, and what ends a run: folders, data, classes, packages, disks."""

import errno
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainers.folder_lock import hold_folder

Train = Callable[..., tuple[int, Path]]
Recipe = dict[str, Any]
ReadRun = Callable[[Path], dict[str, Any]]


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


def test_a_folder_in_which_another_process_trains_is_refused(
    train: Train, recipe: Recipe, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    with hold_folder(tmp_path / "run"):
        code, folder = train(recipe)
    assert code == 2
    assert f"another process trains in {folder}: wait for its end" in capfd.readouterr().err
    assert not any(folder.iterdir())


def test_a_folder_with_other_files_is_refused(
    train: Train, recipe: Recipe, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    assert train(recipe)[0] == 2
    assert "holds no run" in capfd.readouterr().err
    assert (tmp_path / "run" / "thesis.txt").read_text() == "mine"


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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data": {"root": "/nowhere/at/all"}}, "data.root: there is no folder"),
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
    assert code == 1
    assert len(synced) > 3
    said = capfd.readouterr().err.replace("\n", " ")
    assert "could not write checkpoint" in said
    kept = torch.load(folder / "last.ckpt", weights_only=False)["global_step"]
    assert kept < 20
    assert f"has not saved since step {kept}" in said
    assert "final.ckpt could not be written: free some space" in said
    assert not list(folder.glob("*.part"))
    run = read_run(folder)
    assert (run["status"], run["steps"], run["not_saved_since"]) == ("failed", 62, kept)
    assert run["accuracy"] is not None
    monkeypatch.undo()
    code, folder = train(recipe)
    assert code == 0
    run = read_run(folder)
    assert (run["status"], run["resumed_at"], run["not_saved_since"]) == ("completed", [kept], None)
    assert (folder / "final.ckpt").exists()


def test_a_damaged_checkpoint_is_refused_and_left_alone(
    train: Train, recipe: Recipe, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe["phases"][1]["lr"] = {"kind": "constant", "lr": 1e30}
    _, folder = train(recipe)
    saved = torch.load(folder / "last.ckpt", weights_only=True)
    saved["optimizer_states"] = [{"state": {}, "param_groups": []}]
    torch.save(saved, folder / "last.ckpt")
    capfd.readouterr()
    assert train(recipe)[0] == 1
    assert "last.ckpt does not fit (its optimizer_states: " in capfd.readouterr().err
    (folder / "last.ckpt").write_bytes(b"not a checkpoint")
    code, _ = train(recipe)
    assert code == 2
    assert "last.ckpt is damaged" in capfd.readouterr().err
    assert (folder / "last.ckpt").read_bytes() == b"not a checkpoint"


def test_all_that_does_not_fit_the_data_is_told_at_once(
    train: Train, recipe: Recipe, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe["data"]["train_samples"] = 900
    recipe["loader"] |= {"batch_size": 4000, "buffer_bytes": "1KiB"}
    recipe["augment"] = [{"name": "random_resized_crop", "size": 99}]
    assert train(recipe)[0] == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if "recipe.yaml:" in line]
    told = [key for line in lines for key in (*KEYS,) if f" {key}: " in line]
    assert sorted(told) == sorted(KEYS)
    assert len(lines) == len(KEYS)


KEYS = ("augment.0.size", "data.train_samples", "loader.batch_size", "loader.buffer_bytes")


def test_a_module_that_imports_what_is_not_installed_is_named_as_such(
    train: Train,
    recipe: Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "my_net.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe["model"] = {"class_path": "my_net.Net"}
    assert train(recipe)[0] == 2
    said = " ".join(capfd.readouterr().err.split())
    assert "'my_net.Net' imports 'not_installed_anywhere', which is not installed" in said
