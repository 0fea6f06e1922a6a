"""metrics.csv and run.json: what a run leaves behind, whole at any moment."""

import csv
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from perfect.runs.record import RunLog, write_run


class Clock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# ---- metrics.csv --------------------------------------------------------------------------------


def test_a_column_that_turns_up_later_is_empty_before(tmp_path: Path) -> None:
    log = RunLog(tmp_path, Clock())
    log.log_metrics({"loss": 1.0}, step=0)
    log.log_metrics({"loss": 0.9}, step=1)
    log.log_metrics({"accuracy": 0.3}, step=1)
    log.log_metrics({"loss": 0.8, "accuracy": 0.4}, step=2)
    log.save()
    assert [(r["step"], r["loss"], r["accuracy"]) for r in rows(tmp_path)] == [
        ("0.0", "1.0", ""),
        ("1.0", "0.9", ""),
        ("1.0", "", "0.3"),
        ("2.0", "0.8", "0.4"),
    ]


def test_every_row_is_written_once_whatever_is_saved_when(tmp_path: Path) -> None:
    log = RunLog(tmp_path, Clock())
    for step in range(67):
        log.log_metrics({"loss": float(step)}, step=step)
        if step in (5, 6, 40):
            log.save()
        if step == 50:
            log.log_metrics({"late": 1.0}, step=step)
    log.finalize("success")
    log.save()
    written = [float(r["step"]) for r in rows(tmp_path)]
    assert written == [*map(float, range(51)), 50.0, *map(float, range(51, 67))]


def test_a_resume_cuts_the_rows_that_the_checkpoint_does_not_know(tmp_path: Path) -> None:
    clock = Clock()
    log = RunLog(tmp_path, clock)
    for step in range(10):
        clock.now += 1
        log.log_metrics({"loss": step / 10}, step=step)
    log.save()
    again = RunLog(tmp_path, Clock())
    again.resume(6)
    assert [r["step"] for r in again.rows] == [0, 1, 2, 3, 4, 5]
    assert [float(r["step"]) for r in rows(tmp_path)] == [0, 1, 2, 3, 4, 5]
    again.log_metrics({"loss": 0.6, "late": 1.0}, step=6)
    again.save()
    assert [float(r["step"]) for r in rows(tmp_path)] == [0, 1, 2, 3, 4, 5, 6]
    assert rows(tmp_path)[-1]["late"] == "1.0"
    assert rows(tmp_path)[0]["late"] == ""


def test_the_clock_goes_on_after_a_resume_and_counts_no_lost_step_twice(tmp_path: Path) -> None:
    clock = Clock(50.0)
    log = RunLog(tmp_path, clock)
    for step in range(10):
        clock.now += 2
        log.log_metrics({"loss": 1.0}, step=step)
    log.save()
    assert log.wall_seconds == 20
    later = Clock(9000.0)
    again = RunLog(tmp_path, later)
    later.now += 100  # building the model is no part of the run
    again.resume(6)
    assert again.wall_seconds == 12
    later.now += 3
    again.log_metrics({"loss": 1.0}, step=6)
    assert again.rows[-1]["wall_seconds"] == 15


def test_what_is_no_number_survives_the_file(tmp_path: Path) -> None:
    log = RunLog(tmp_path, Clock())
    log.log_metrics({"loss": math.nan, "other": math.inf}, step=0)
    log.log_metrics({"loss": 1.0}, step=9)
    log.save()
    again = RunLog(tmp_path, Clock())
    again.resume(5)
    [row] = again.rows
    assert math.isnan(row["loss"])
    assert row["other"] == math.inf


@pytest.mark.parametrize("torn", ["8", "80.0", "80.0,", "80.0,12", "80.0,12.0,0."])
def test_a_last_row_torn_by_a_kill_does_not_stop_the_resume(torn: str, tmp_path: Path) -> None:
    log = RunLog(tmp_path, Clock())
    for step in range(3):
        log.log_metrics({"loss": 1.0}, step=step)
    log.save()
    with log.path.open("a", encoding="utf-8") as file:
        file.write(torn)
    again = RunLog(tmp_path, Clock())
    again.resume(100)
    assert [r["step"] for r in again.rows][:3] == [0, 1, 2]
    assert again.wall_seconds >= 0
    again.log_metrics({"loss": 1.0}, step=100)
    again.save()
    assert float(rows(tmp_path)[-1]["step"]) == 100


# ---- run.json -----------------------------------------------------------------------------------


def test_what_is_no_number_becomes_null(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    deep: dict[str, Any] = {
        "accuracy": math.nan,
        "list": [1.0, math.inf, (-math.inf, "nan")],
        "inner": {"loss": math.nan, 3: True},
        "none": None,
    }
    write_run(path, deep)

    def refuse(word: str) -> None:
        raise AssertionError(word)

    assert json.loads(path.read_text(), parse_constant=refuse) == {
        "accuracy": None,
        "list": [1.0, None, [None, "nan"]],
        "inner": {"loss": None, "3": True},
        "none": None,
    }
    assert math.isnan(deep["accuracy"]), "the run's own numbers are left alone"


def test_run_json_is_whole_or_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    write_run(path, {"status": "running"})
    with pytest.raises(TypeError):
        write_run(path, {"status": object()})
    with monkeypatch.context() as patch:

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space"):
            write_run(path, {"status": "completed"})
    assert json.loads(path.read_text()) == {"status": "running"}
