"""metrics.csv as columns, and the rates between its rows against arithmetic done here."""

from pathlib import Path

import numpy as np
import pytest

from perfect.report.plots import RunPhases, input_pipeline
from perfect.report.results import Metrics, rates, read_metrics

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
