"""Whose folder it is, how far it is, and that nothing of another run is ever written over."""

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from perfect.errors import FolderError
from perfect.runs.folder import RunFolder

CONFIG: dict[str, Any] = {
    "seed": 0,
    "model": {"name": "resnet18"},
    "phases": [{"name": "pretrain", "passes": 3, "lr": 0.1}, {"name": "finetune", "passes": 1}],
}


def test_a_folder_that_is_missing_or_empty_is_new(tmp_path: Path) -> None:
    assert RunFolder(tmp_path / "nowhere").open(CONFIG) == "new"
    assert RunFolder(tmp_path).open(CONFIG) == "new"
    assert list(tmp_path.iterdir()) == [], "looking writes nothing"


def test_a_folder_of_the_same_configuration_is_begun_until_it_is_completed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.begin(CONFIG)
    assert folder.open(CONFIG) == "begun"
    for status in ("running", "interrupted", "failed"):
        folder.write({"status": status})
        assert folder.open(CONFIG) == "begun"
    folder.write({"status": "completed"})
    assert folder.open(CONFIG) == "completed"


def changed(**changes: Any) -> dict[str, Any]:
    return {**CONFIG, **changes}


@pytest.mark.parametrize(
    ("mine", "complaint"),
    [
        (changed(seed=1), "seed is 0 there, 1 here"),
        (changed(model={"name": "vgg16"}), "model.name is 'resnet18' there, 'vgg16' here"),
        (changed(extra=True), "extra is None there, True here"),
        (
            changed(phases=[{**CONFIG["phases"][0], "lr": 0.2}, CONFIG["phases"][1]]),
            "phases.0.lr is 0.1 there, 0.2 here",
        ),
        (changed(phases=CONFIG["phases"][:1]), r"phases is \["),
    ],
    ids=["value", "deep", "new key", "in a list", "length of a list"],
)
def test_a_folder_of_another_configuration_is_refused_with_what_differs(
    mine: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path)
    folder.begin(CONFIG)
    with pytest.raises(FolderError, match=complaint) as error:
        folder.open(mine)
    assert "another configuration" in str(error.value)
    assert "another --out" in str(error.value)


def test_a_folder_of_something_else_is_never_written_to(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(FolderError, match="is not empty and holds no run"):
        RunFolder(tmp_path).open(CONFIG)


@pytest.mark.parametrize("text", ["seed: [", "\t"])
def test_a_damaged_configuration_is_said(text: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.config.write_text(text)
    with pytest.raises(FolderError, match="is damaged"):
        folder.open(CONFIG)


def test_a_damaged_run_json_is_said_with_what_to_do(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.begin(CONFIG)
    folder.run.write_text('{"status": "comp')
    with pytest.raises(FolderError, match=r"run\.json is damaged.*delete it to go on"):
        folder.open(CONFIG)


@pytest.mark.parametrize("moment", ["write_text", "replace"])
def test_a_kill_while_the_folder_is_begun_does_not_lock_the_same_command_out(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 at any moment, then the same command resumes: also while config.yaml is written."""

    class Killed(BaseException):
        """As sudden as kill -9: nothing catches it on the way."""

    folder = RunFolder(tmp_path)
    folder.begin(CONFIG)  # the first sitting
    write = Path.write_text

    def half(path: Path, text: str, **options: Any) -> int:
        write(path, text[: len(text) // 2], **options)
        raise Killed

    def never(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        if moment == "write_text":
            patch.setattr(Path, "write_text", half)
        else:
            patch.setattr("os.replace", never)
        with contextlib.suppress(Killed):
            folder.begin(CONFIG)  # the second sitting, killed
    assert folder.open(CONFIG) == "begun"


class Ruse:
    """What a stranger may have put into a checkpoint."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def test_a_checkpoint_runs_no_code_of_whoever_wrote_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(tmp_path)
    torch.save({"global_step": 5, "extra": Ruse()}, folder.checkpoint)
    with pytest.raises(FolderError, match=r"holds objects of posix\.mkdir, .* run code"):
        folder.checkpoint_step()
    assert not Path("ran").exists()


class Settings:
    """What a user's own module may keep in its checkpoints."""


def test_a_users_own_class_in_a_checkpoint_is_named_and_may_be_allowed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    torch.save({"global_step": 5, "extra": Settings()}, folder.checkpoint)
    with pytest.raises(FolderError, match=r"Settings, .*add_safe_globals\(\[Settings\]\)"):
        folder.checkpoint_step()
    with torch.serialization.safe_globals([Settings]):
        assert folder.checkpoint_step() == 5


@pytest.mark.parametrize("content", [b"", b"PK", b"no checkpoint"])
def test_a_damaged_checkpoint_is_said_with_what_to_do(content: bytes, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.checkpoint.write_bytes(content)
    with pytest.raises(FolderError, match=r"last\.ckpt is damaged .* delete it to begin anew"):
        folder.checkpoint_step()


def test_every_resume_is_noted_behind_the_earlier_ones(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.resumed_at(None) == []
    folder.write({"resumed_at": [10]})
    assert folder.resumed_at(25) == [10, 25]
    assert folder.resumed_at(None) == [10]
