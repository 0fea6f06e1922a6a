"""Runs side by side: the figures of the table, what is marked, and what bad input says."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.pages import Page

from perfect.compare import main
from perfect.report.measures import differences
from perfect.report.results import Metrics, Run

BASE: dict[str, Any] = {
    "status": "completed", "seed": 0, "accuracy": 0.91, "accuracy_on": "test", "steps": 1200,
    "wall_seconds": 100.0, "stall_seconds": 40.0,
    "decoded_samples": 24_000, "extra_decodes": 0, "served_samples": 24_000, "fresh_passes": 24.0,
    "train_samples": 1000, "environment": {"torch": "2.12.0"},
    "config": {"loader": {"batch_size": 20}, "phases": [{"reuse": 1}]},
}  # fmt: skip
REUSE: dict[str, Any] = {
    "accuracy": 0.905, "wall_seconds": 50.0, "stall_seconds": 2.0,
    "decoded_samples": 14_400, "fresh_passes": 14.4,
    "config": {"loader": {"batch_size": 20}, "phases": [{"reuse": 3}, {"reuse": 1}]},
}  # fmt: skip
ROWS = [
    {"step": 400, "wall_seconds": 20, "decoded": 4000, "lr": 0.05},
    {"step": 600, "wall_seconds": 30, "val_accuracy": 0.5},
    {"step": 800, "wall_seconds": 40, "decoded": 8000, "lr": 0.25},
    {"step": 1200, "wall_seconds": 90, "val_accuracy": 0.9},
]


def make_run(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    record = {"name": folder.name} | BASE | changes
    (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")
    with (folder / "metrics.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["step", "wall_seconds", "decoded", "lr", "val_accuracy"])
        writer.writeheader()
        writer.writerows(ROWS)
    return folder


@pytest.fixture
def two(tmp_path: Path) -> list[str]:
    """No reuse, and reuse."""
    runs = tmp_path / "runs"
    return [str(make_run(runs / "plain")), str(make_run(runs / "reuse", **REUSE))]


def compared(*folders: str) -> Page:
    assert main(folders) == 0
    return Page((Path(folders[0]).parent / "compare.html").read_text())


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err.splitlines()


# ---- the table ----------------------------------------------------------------------------------

FIGURES = {
    "Accuracy": ["91.00 %", "90.50 %"],
    "Wall time": ["100.0 s", "50.0 s"],
    "Speed-up": ["1.00×", "2.00×"],  # noqa: RUF001
    "Decodes": ["24,000", "14,400"],
    "Decodes saved": ["0.0 %", "40.0 %"],
    "Fresh passes": ["24", "14.4"],
    "Served": ["24,000", "24,000"],
    "Stall": ["40.0 s", "2.0 s"],
    "Stall share": ["40.0 %", "4.0 %"],
    "Steps": ["1200", "1200"],
    "Peak lr": ["0.25", "0.25"],
}


def test_the_page_has_every_figure_of_every_run(two: list[str]) -> None:
    page = compared(*two)
    assert page.rows[0] == ["", "plain", "reuse"]
    assert {name: page.row(name) for name in FIGURES} == FIGURES


def test_the_terminal_shows_the_same_figures_and_then_the_path(
    two: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(two) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["plain", "reuse"]
    shown = {
        name: re.split(r"\s{2,}", line.strip())[1:]
        for name in FIGURES
        for line in lines
        if re.match(rf"{name}\s{{2}}", line)
    }
    assert shown == FIGURES
    assert lines[-1] == str(Path(two[0]).parent / "compare.html")


def test_decodes_made_again_after_a_resume_count(tmp_path: Path) -> None:
    first = make_run(tmp_path / "a", **REUSE)
    page = compared(str(first), str(make_run(tmp_path / "b", **REUSE, extra_decodes=2400)))
    assert page.row("Decodes") == ["14,400", "16,800"]
    assert page.row("Decodes saved") == ["40.0 %", "30.0 %"]


def test_speed_ups_are_against_the_first_run_without_reuse_or_the_one_that_is_named(
    two: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = compared(*two[::-1])
    assert page.row("Speed-up") == ["2.00×", "1.00×"]  # noqa: RUF001
    assert "in wall time, against plain, which is without reuse." in page.text
    for named in ("reuse", two[1]):
        page = compared(*two, "--baseline", named)
        assert page.row("Speed-up") == ["0.50×", "1.00×"]  # noqa: RUF001
        assert '"plain" against "reuse": 91.00 % accuracy against 90.50 %' in page.text
    capsys.readouterr()
    [said] = refused(capsys, *two, "--baseline", "none")
    assert said == "compare: --baseline none: is none of the runs; give one of plain, reuse"
    again = str(make_run(tmp_path / "runs/again", **REUSE, steps=1200))
    assert "against reuse." in compared(two[1], again).text


def test_figures_that_a_run_lacks_are_dashes(tmp_path: Path) -> None:
    first = make_run(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b/run.json").write_text('{"status": "failed"}', encoding="utf-8")
    page = compared(str(first), str(tmp_path / "b"))
    assert page.rows[0] == ["", "a", "b (failed)"]
    assert {page.row(name)[1] for name in FIGURES} == {"\N{EN DASH}"}


def test_the_numbers_are_kept_as_json_beside_the_page_and_not_in_its_place(
    two: list[str], tmp_path: Path
) -> None:
    assert main([*two, "--out", str(tmp_path / "mine.html")]) == 0
    plain, reuse = json.loads((tmp_path / "mine.json").read_text(encoding="utf-8"))
    assert (plain["run"], plain["Accuracy"], plain["Decodes"]) == ("plain", 0.91, 24_000)
    assert (reuse["run"], reuse["Speed-up"], reuse["Stall share"]) == ("reuse", 2.0, 0.04)
    assert (reuse["environment"], reuse["config"]) == (BASE["environment"], REUSE["config"])
    with pytest.raises(SystemExit) as stopped:
        main([*two, "--out", str(tmp_path / "page.json")])
    assert stopped.value.code == 2
    assert not (tmp_path / "page.json").exists()


# ---- what a reader must know --------------------------------------------------------------------


def test_a_running_run_is_included_marked_and_wins_nothing(
    two: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    young = {"status": "running", "wall_seconds": 1.0, "stall_seconds": 0.0, "accuracy": None}
    page = compared(*two, str(make_run(tmp_path / "runs/young", **young)))
    assert page.rows[0] == ["", "plain", "reuse", "young (running)"]
    assert page.row("Wall time") == ["100.0 s", "50.0 s", "1.0 s"]
    assert page.row("Speed-up")[2] == page.row("Accuracy")[2] == "\N{EN DASH}"
    text = (tmp_path / "runs/compare.html").read_text(encoding="utf-8")
    assert "<b>50.0 s</b>" in text and "<b>1.0 s</b>" not in text
    said = "These are still running, with figures so far: young (running)."
    assert said in page.text and said in capsys.readouterr().out


def test_no_speed_up_is_told_against_a_first_run_that_was_interrupted(tmp_path: Path) -> None:
    first = make_run(tmp_path / "a", status="interrupted")
    page = compared(str(first), str(make_run(tmp_path / "b")))
    assert page.row("Speed-up") == ["\N{EN DASH}", "\N{EN DASH}"]
    assert "2 runs side by side." in page.text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"steps": 600}, "The runs took different numbers of steps"),
        ({"accuracy_on": "holdout"}, "Some accuracies are of the test set, others of the hold-out"),
    ],
)
def test_runs_that_do_not_compare_fairly_are_told(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    first = str(make_run(tmp_path / "a"))
    assert said not in compared(first, str(make_run(tmp_path / "b"))).text
    assert said in compared(first, str(make_run(tmp_path / "c", **change))).text


def test_only_keys_that_differ_are_shown(two: list[str]) -> None:
    page = compared(*two)
    assert page.row("phases[0].reuse") == ["1", "3"]
    assert page.row("phases[1]") == ["\N{EN DASH}", "{reuse: 1}"]
    assert "batch_size" not in page.text
    configs = {"a": None, "b": True, "c": [1, 2]}, {"b": 1, "c": [1, 2]}
    found = differences([Run(Path(), {"config": config}, Metrics({})) for config in configs])
    assert found == [("a", ["null", "\N{EN DASH}"]), ("b", ["true", "1"])]


# ---- curves -------------------------------------------------------------------------------------


# ---- names, paths -------------------------------------------------------------------------------


def test_names_are_text_on_the_page_and_in_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = make_run(tmp_path / "a", name="<script>x</script>")
    second = make_run(tmp_path / "b", name="[red]$b_{", config={"<i>": "<b>"})
    page = compared(str(first), str(second))
    assert "script" not in page.tags and "i" not in page.tags
    assert page.rows[0] == ["", "<script>x</script>", "[red]$b_{"]
    assert page.row("<i>") == ["\N{EN DASH}", "<b>"]
    out = capsys.readouterr().out
    assert "<script>x</script>" in out and "[red]$b_{" in out


# ---- bad input ----------------------------------------------------------------------------------


def test_everything_wrong_is_said_at_once_and_the_others_are_shown(
    two: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty, damaged, absent = (tmp_path / "runs" / name for name in ("empty", "damaged", "absent"))
    empty.mkdir()
    damaged.mkdir()
    (damaged / "run.json").write_text('{"status": "compl', encoding="utf-8")
    a_file, twice = f"{two[1]}/run.json", f"{two[0]}/../plain"
    assert main([*two, str(empty), str(damaged), str(absent), twice, a_file]) == 2
    told = capsys.readouterr()
    said = told.err.splitlines()
    assert len(said) == 5
    give = "; give the folder of a run, as perfect-train made it"
    assert said[0] == f"compare: {empty}: holds no run.json{give}"
    assert said[1].startswith(f"compare: {damaged}: run.json is damaged (")
    assert said[1].endswith("; delete it and run again")
    assert said[2] == f"compare: {absent}: is no folder{give}"
    assert said[3] == f"compare: {twice}: is given twice; leave one out"
    assert said[4] == f"compare: {a_file}: is no folder{give}"
    assert told.out.splitlines()[0].split() == ["plain", "reuse"]
    assert Page((tmp_path / "runs/compare.html").read_text()).rows[0] == ["", "plain", "reuse"]


def test_a_page_that_cannot_be_written_is_told(
    two: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, *two, "--out", str(tmp_path / "nowhere/page.html"))
    path = tmp_path / "nowhere/page.html"
    assert said == [f"compare: {path}: No such file or directory; give another --out"]


def offloaded(folder: Path, losses: dict[int, float], **changes: Any) -> str:
    """A run within a budget, with these training losses."""
    config = {**BASE["config"], "offload": {"budget": "50%"}, **changes}
    make_run(folder, config=config)
    return with_losses(folder, losses)


def with_losses(folder: Path, losses: dict[int, float]) -> str:
    rows = [f"{step},{loss!r}" for step, loss in losses.items()]
    (folder / "metrics.csv").write_text("\n".join(["step,train_loss", *rows, ""]))
    return str(folder)


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ({10: 0.5, 20: 0.25}, "All 2 losses of plain and small are equal, bit for bit."),
        ({10: 0.5, 20: 0.25000001}, "The losses of plain and small differ from step 20 on."),
        ({10: 0.5, 21: 0.25}, "The losses of plain and small differ from step 20 on."),
        ({10: 0.5}, "The losses of plain and small differ from step 20 on."),
    ],
)
def test_a_run_within_a_budget_is_told_to_have_the_losses_of_the_one_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], losses: dict[int, float], said: str
) -> None:
    plain = with_losses(make_run(tmp_path / "plain"), {10: 0.5, 20: 0.25})
    small = offloaded(tmp_path / "small", losses)
    assert main([plain, small]) == 0
    assert said in capsys.readouterr().out.splitlines()
    assert said in (tmp_path / "compare.html").read_text()


def test_losses_are_not_compared_where_more_than_the_budget_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = with_losses(make_run(tmp_path / "plain"), {10: 0.5})
    small = offloaded(tmp_path / "small", {10: 0.5}, loader={"batch_size": 10})
    assert main([plain, small]) == 0
    assert "bit for bit" not in capsys.readouterr().out
