"""A run folder read back: the figures that follow from it, and what a bad one is told."""

import json
from pathlib import Path
from typing import Any

import pytest

from perfect.errors import RunError
from perfect.report.report import write_report
from perfect.report.results import read_run

RUN: dict[str, Any] = {
    "status": "completed", "wall_seconds": 70.0, "stall_seconds": 6.1,
    "decoded_samples": 14_400, "extra_decodes": 0, "served_samples": 24_000,
    "train_samples": 1000,
}  # fmt: skip


def make_run(folder: Path, **changes: Any) -> Path:
    (folder / "run.json").write_text(json.dumps(RUN | changes), encoding="utf-8")
    return folder


# ---- figures ------------------------------------------------------------------------------------


def test_decodes_made_again_after_a_resume_are_not_saved(tmp_path: Path) -> None:
    assert read_run(make_run(tmp_path)).saved == pytest.approx(0.4)
    run = read_run(make_run(tmp_path, extra_decodes=2400))
    assert run.decodes == 16_800
    assert run.saved == pytest.approx(0.3)


def test_the_stall_is_a_share_of_the_whole_run(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path, stall_seconds=7.0, wall_seconds=70.0))
    assert run.stall_share == pytest.approx(0.1)


def test_passes_are_told_by_the_run_or_else_worked_out(tmp_path: Path) -> None:
    assert read_run(make_run(tmp_path, fresh_passes=14.5)).fresh_passes == 14.5
    assert read_run(make_run(tmp_path)).fresh_passes == 14.4


def test_figures_that_a_run_did_not_reach_are_none(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"status": "running"}', encoding="utf-8")
    run = read_run(tmp_path)
    figures = (run.decodes, run.saved, run.fresh_passes, run.stall_share, run.number("accuracy"))
    assert figures == (None,) * 5
    assert (run.name, run.completed, run.rows("phases")) == (tmp_path.name, False, [])


# ---- bad input ----------------------------------------------------------------------------------


def test_a_cell_of_the_metrics_that_is_no_number_is_told(tmp_path: Path) -> None:
    (make_run(tmp_path) / "metrics.csv").write_text("step,lr\n1,fast\n", encoding="utf-8")
    said = (
        r"metrics\.csv cannot be read \(line 2: lr: 'fast' is not a number\); repair or remove it"
    )
    with pytest.raises(RunError, match=said):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"status": "compl', "run.json is damaged"),
        ("[]", "it is not an object"),
        ("{}", "status is None, not one of completed, running, interrupted, stopped, failed"),
        ('{"status": "done"}', "status is 'done'"),
        ('{"status": "failed", "phases": [{"name": "a"}]}', r"phases\[0\] lacks reuse and first_"),
    ],
)
def test_a_damaged_run_json_is_told_and_has_no_report(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "run.json").write_text(text, encoding="utf-8")
    with pytest.raises(RunError, match=said):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_everything_wrong_with_a_run_json_is_told_at_once(tmp_path: Path) -> None:
    make_run(tmp_path, steps="many", phases={}, accuracy=True)
    with pytest.raises(RunError) as told:
        read_run(tmp_path)
    for said in ("steps is 'many', not a number", "phases is '{}', not a list", "accuracy is 'T"):
        assert said in str(told.value)


def test_a_folder_without_a_run_is_told_from_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"holds no run\.json; give the folder of a run"):
        read_run(tmp_path)
    with pytest.raises(RunError, match="is no folder"):
        read_run(tmp_path / "nowhere")
