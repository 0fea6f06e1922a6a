"""A run folder read back: its figures, its rates, its curves, and what a bad one is told."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perfect.errors import RunError
from perfect.report.panels import curve, line_style
from perfect.report.plots import RunPhases, input_pipeline
from perfect.report.report import write_report
from perfect.report.results import Metrics, Run, rates, read_metrics, read_run

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


TEXT = """step,wall_seconds,decoded,served,stall_seconds,val_accuracy
100,10,1000,3000,1,
100,10,,,,0.5
800,40,7000,18000,4,
1200,60,,,,0.92
"""


def metrics_csv(folder: Path, text: str = TEXT) -> Path:
    path = folder / "metrics.csv"
    path.write_text(text, encoding="utf-8")
    return path


def columns(**values: list[float]) -> Metrics:
    return Metrics({name: np.array(column, dtype=float) for name, column in values.items()})


def test_pairs_are_the_rows_that_have_both_numbers(tmp_path: Path) -> None:
    metrics = read_metrics(metrics_csv(tmp_path))
    steps, accuracy = metrics.pairs("step", "val_accuracy")
    assert (steps.tolist(), accuracy.tolist()) == ([100, 1200], [0.5, 0.92])
    assert not len(metrics.pairs("decoded", "val_accuracy")[0])
    assert not len(metrics.pairs("step", "no_such_column")[0])


def test_a_value_that_is_no_number_is_told_from_one_that_was_not_logged(tmp_path: Path) -> None:
    path = metrics_csv(tmp_path, "step,loss,other\n1,0.5,\n2,,\n3,nan,\n4,inf,\n")
    metrics = read_metrics(path)
    assert metrics.first_not_finite("loss") == 3
    assert metrics.first_not_finite("other") is None
    assert metrics.pairs("step", "loss")[0].tolist() == [1]


def test_a_row_that_a_kill_cut_short_is_left_out(tmp_path: Path) -> None:
    path = metrics_csv(tmp_path, TEXT + "1300,6")
    assert read_metrics(path).columns["step"].tolist() == [100, 100, 800, 1200]


def test_a_cell_that_is_no_number_is_named_by_line_and_column(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"line 3: lr: 'fast' is not a number"):
        read_metrics(metrics_csv(tmp_path, "step,lr\n1,0.1\n2,fast\n"))


def test_rates_are_differences_between_rows_that_have_all_counters(tmp_path: Path) -> None:
    seen = rates(read_metrics(metrics_csv(tmp_path)))
    assert seen is not None
    assert seen.seconds.tolist() == [10, 40]
    assert (seen.decoded[0], seen.served[0], seen.stalled[0]) == (200, 500, 0.1)


def test_many_rows_become_few_intervals_without_losing_a_sample() -> None:
    time = np.arange(1000.0)
    counters = {"decoded": time**2, "served": 3 * time**2, "stall_seconds": 0.5 * time}
    seen = rates(Metrics({"step": time, "wall_seconds": time} | counters), intervals=60)
    assert seen is not None and len(seen.served) == 60
    assert (seen.served * np.diff(seen.seconds)).sum() == pytest.approx(3 * 999**2)
    assert seen.stalled == pytest.approx(0.5)


def test_a_counter_that_went_back_makes_a_gap_and_no_negative_rate() -> None:
    metrics = columns(
        step=[1, 2, 3, 4], wall_seconds=[0, 1, 2, 3], decoded=[0, 10, 5, 15],
        served=[0, 30, 15, 45], stall_seconds=[0, 0, 0, 0],
    )  # fmt: skip
    seen = rates(metrics)
    assert seen is not None
    np.testing.assert_array_equal(seen.decoded, [10, np.nan, 10])
    assert input_pipeline(metrics, RunPhases()) is not None


NAN = np.nan
RECORD = {"status": "completed", "accuracy": 0.91, "decoded_samples": 24_000, "wall_seconds": 100.0}


def run(**columns: list[float]) -> Run:
    return Run(
        Path("a"), RECORD, Metrics({k: np.array(v, dtype=float) for k, v in columns.items()})
    )


def test_accuracy_over_decodes_is_read_off_between_the_rows_around_it() -> None:
    seen = run(
        step=[400, 600, 800, 1200], wall_seconds=[20, 30, 40, 90],
        decoded=[4000, NAN, 8000, NAN], val_accuracy=[NAN, 0.5, NAN, 0.9],
    )  # fmt: skip
    drawn = curve(seen, "decoded", "decoded_samples")
    np.testing.assert_array_equal(drawn.x, [6000, 8000])
    np.testing.assert_array_equal(drawn.y, [0.5, 0.9])
    assert drawn.end == (24_000, 0.91)
    np.testing.assert_array_equal(curve(seen, "wall_seconds", "wall_seconds").x, [30, 90])


def test_accuracy_before_the_first_counter_is_read_off_from_the_start() -> None:
    seen = run(step=[200, 400], decoded=[NAN, 4000], val_accuracy=[0.3, NAN])
    np.testing.assert_array_equal(curve(seen, "decoded", "decoded_samples").x, [2000])


def test_without_the_counter_there_is_no_curve_and_without_its_total_no_end() -> None:
    drawn = curve(run(step=[200], val_accuracy=[0.3]), "decoded", "no_such_total")
    assert not len(drawn.x) and not len(drawn.y) and drawn.end is None


def test_28_runs_are_drawn_in_28_ways() -> None:
    assert len({line_style(number) for number in range(28)}) == 28
