"""Accuracy over steps, decodes and seconds: where its points stand, and how runs are told apart."""

from pathlib import Path

import numpy as np

from perfect.report.panels import curve, line_style
from perfect.report.results import Metrics, Run

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
