"""The report of a run that offloads: stalls, memory, predictions, from rows by hand."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from support.pages import Page

from perfect.compare import main
from perfect.errors import RunError
from perfect.report.offloading import prediction
from perfect.report.report import write_report
from perfect.report.words import DASH, TIMES

PLAN: dict[str, Any] = {
    "inputs": "(8, 3) (8,)", "part": "whole step", "runs": 90, "seconds": 10.0,
    "compute_seconds": 6.0, "transfer_seconds": 1.0, "median_seconds": 0.11,
    "predicted_seconds": 0.1, "bound_seconds": 0.09, "binds": "compute", "copies": 4,
    "bytes_in": 3 * 2**20, "bytes_out": 2**20, "peak_bytes": 10 * 2**20, "held_bytes": 9 * 2**20,
    "picture": "memory-1.svg",
}  # fmt: skip
PHASES: list[dict[str, Any]] = [
    {"name": "pretrain", "runs": 60, "seconds": 40.0, "compute_seconds": 20.0,
     "transfer_seconds": 8.0, "input_seconds": 2.0, "planning_seconds": 4.0},
    {"name": "finetune", "runs": 30, "seconds": 10.0, "compute_seconds": 5.0,
     "transfer_seconds": 2.0, "input_seconds": 1.0, "planning_seconds": 0.0},
]  # fmt: skip
OFFLOAD: dict[str, Any] = {
    "budget_bytes": 11 * 2**20, "host_budget_bytes": None, "smallest_bytes": 4 * 2**20,
    "peak_bytes": 10 * 2**20, "host_bytes": 30 * 2**20, "unmoved_bytes": 20 * 2**20,
    "held_bytes": 9 * 2**20, "resident_seconds": 0.09, "bound_seconds": 0.09, "binds": "compute",
    "predicted_seconds": 0.1, "median_seconds": 0.11, "transfer_share": 0.1, "runs": 90,
    "seconds": 50.0, "compute_seconds": 25.0, "transfer_seconds": 10.0, "input_seconds": 3.0,
    "planning_seconds": 4.0, "plans_made": 1, "plans": [PLAN], "phases": PHASES,
}  # fmt: skip
RUN: dict[str, Any] = {
    "status": "completed", "name": "small", "steps": 90, "wall_seconds": 100.0, "accuracy": 0.9,
    "accuracy_on": "test", "best_accuracy": 0.9, "stall_seconds": 3.0, "decoded_samples": 100,
    "served_samples": 300, "train_samples": 100,
}  # fmt: skip


def make_run(folder: Path, offload: Any = OFFLOAD, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    record = RUN | ({} if offload is None else {"offload": offload}) | changes
    (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")
    return folder


def page(folder: Path) -> str:
    return write_report(folder).read_text(encoding="utf-8")


def draw(path: Path) -> None:
    figure = Figure()
    axes = figure.add_subplot()
    axes.fill_between([0, 1], [0, 1], hatch="////")
    axes.plot([0, 1], [0, 1], "o")
    figure.savefig(path)


# ---- what is shown ------------------------------------------------------------------------------


def test_both_stalls_stand_side_by_side_for_every_phase_and_the_whole_run(tmp_path: Path) -> None:
    found = Page(page(make_run(tmp_path)))
    head = next(row for row in found.rows if "Waiting for transfers" in row)
    assert head[2:5] == ["Kernels", "Waiting for transfers", "Waiting for input"]
    # Of 50, 40 and 10 s; what is in no part is the rest.
    assert found.row("whole run") == ["50.0 s", "50.0 %", "20.0 %", "6.0 %", "8.0 %", "16.0 %"]
    assert found.row("pretrain") == ["40.0 s", "50.0 %", "20.0 %", "5.0 %", "10.0 %", "15.0 %"]
    assert found.row("finetune") == ["10.0 s", "50.0 %", "20.0 %", "10.0 %", "0.0 %", "20.0 %"]


def test_memory_is_told_against_what_a_step_needs(tmp_path: Path) -> None:
    found = Page(page(make_run(tmp_path)))
    assert found.row("Budget") == ["11.0 MiB", "55.0 %"]
    assert found.row("Taken by the plan") == ["10.0 MiB", "50.0 %"]
    assert found.row("In use at the same time, measured") == ["9.0 MiB", "45.0 %"]
    assert found.row("The smallest budget that can be planned") == ["4.0 MiB", "20.0 %"]


def test_the_pictures_that_the_run_drew_are_images_in_which_nothing_runs(tmp_path: Path) -> None:
    nasty = "'\"><script>"
    plans = [PLAN, PLAN | {"inputs": nasty, "part": nasty, "picture": "memory-2.svg"}]
    make_run(tmp_path, OFFLOAD | {"plans": plans})
    without = page(tmp_path)
    draw(tmp_path / "memory-1.svg")
    stranger = b"<svg onload='alert(1)'><script>alert(2)</script></svg>"
    (tmp_path / "memory-2.svg").write_bytes(stranger)
    text = page(tmp_path)
    assert "alert(" not in text and "://" not in text and "<script" not in text
    assert text.count("<svg") == without.count("<svg")
    attributes = Page(text).attributes
    of_steps = [value for name, value in attributes if name == "alt"]
    assert of_steps == ["Memory: whole step, batch of (8, 3) (8,)",
                        f"Memory: {nasty}, batch of {nasty}"]  # fmt: skip
    shown = [value.partition("svg+xml;base64,")[2] for name, value in attributes if name == "src"]
    assert base64.b64decode(shown[0]) == (tmp_path / "memory-1.svg").read_bytes()
    assert base64.b64decode(shown[1]) == stranger


def test_a_picture_is_read_from_the_run_folder_alone(tmp_path: Path) -> None:
    draw(tmp_path / "outside.svg")
    text = page(
        make_run(tmp_path / "run", OFFLOAD | {"plans": [PLAN | {"picture": "../outside.svg"}]})
    )
    assert "Memory: whole step" not in text


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        (0.1, f"A step was predicted to take 100 ms and took 100 ms: 1.00{TIMES}."),
        (0.11, f"A step was predicted to take 100 ms and took 110 ms: 1.10{TIMES}."),
        (0.112, "That is 12 % more:"),
        (0.05, "That is 50 % less:"),
    ],
)
def test_a_prediction_that_is_more_than_a_tenth_off_is_said_to_be(
    measured: float, said: str
) -> None:
    text = prediction({"predicted_seconds": 0.1, "median_seconds": measured})
    assert said in text
    assert ("That is" in text) == ("That is" in said)


# ---- runs without it ----------------------------------------------------------------------------


def test_a_run_without_offload_has_none_of_it(tmp_path: Path) -> None:
    text = page(make_run(tmp_path, None))
    assert "ransfer" not in text and "Memory over" not in text and "predicted" not in text
    assert "Stall share" in text


def test_a_run_that_trained_eagerly_is_not_said_to_have_had_no_kernels(tmp_path: Path) -> None:
    eager = {"runs": 0, "plans_made": 0, "plans": [], "phases": [{"name": "all", "seconds": 9.0}]}
    text = page(make_run(tmp_path, eager))
    assert "No step was planned: the run trained eagerly." in text
    assert "Waiting for transfers" not in text


def test_a_damaged_section_is_named(tmp_path: Path) -> None:
    make_run(tmp_path, OFFLOAD | {"plans": [{"part": "whole step"}], "phases": [3]})
    with pytest.raises(RunError, match=r"offload\.plans\[0\] lacks inputs and runs"):
        write_report(tmp_path)
    with pytest.raises(RunError, match=r"offload\.phases\[0\] lacks name and seconds"):
        write_report(tmp_path)


# ---- runs side by side --------------------------------------------------------------------------


def table(folders: list[Path], capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    assert main([*map(str, folders)]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {line[:16].strip(): re.split(r"\s{2,}", line[16:].strip()) for line in lines}


def test_a_comparison_has_rows_of_memory_and_transfers_where_a_run_has_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, moved = make_run(tmp_path / "a", None), make_run(tmp_path / "b")
    told = table([plain, moved], capsys)
    assert told["Transfer stall"] == [DASH, "10.0 %"]
    assert told["Step memory"] == [DASH, "10.0 MiB"]
    assert told["Memory budget"] == [DASH, "11.0 MiB"]


# ---- words --------------------------------------------------------------------------------------
