"""What a comparison keeps for a program to read, beside its page."""

import json
from pathlib import Path
from typing import Any

import pytest

from perfect.compare import main
from perfect.report.measures import differences
from perfect.report.results import Metrics, Run

RUN: dict[str, Any] = {
    "status": "completed", "accuracy": 0.91, "wall_seconds": 100.0, "stall_seconds": 40.0,
    "decoded_samples": 24_000, "served_samples": 24_000, "train_samples": 1000,
    "environment": {"torch": "2.12.0", "numpy": "2.4.0", "processor": "one", "cores": 2},
    "config": {"phases": [{"reuse": 1}]},
}  # fmt: skip
REUSE = RUN | {"wall_seconds": 50.0, "stall_seconds": 2.0, "decoded_samples": 14_400}


@pytest.fixture
def two(tmp_path: Path) -> list[str]:
    for name, run in (("a", RUN), ("b", REUSE)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps(run), encoding="utf-8")
    return [str(tmp_path / "a"), str(tmp_path / "b")]


def test_the_numbers_of_the_table_are_kept_as_json_beside_the_page(
    two: list[str], tmp_path: Path
) -> None:
    assert main([*two, "--out", str(tmp_path / "mine.html")]) == 0
    plain, reuse = json.loads((tmp_path / "mine.json").read_text(encoding="utf-8"))
    assert (plain["run"], plain["Accuracy"], plain["Decodes"]) == ("a", 0.91, 24_000)
    assert (reuse["run"], reuse["Speed-up"], reuse["Stall share"]) == ("b", 2.0, 0.04)
    assert reuse["environment"] == RUN["environment"]
    assert reuse["config"] == RUN["config"]


def test_the_numbers_do_not_take_the_place_of_the_page(two: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*two, "--out", str(tmp_path / "page.json")])
    assert stopped.value.code == 2
    assert not (tmp_path / "page.json").exists()


def test_differences_tell_a_missing_key_from_null_and_true_from_one() -> None:
    configs = {"a": None, "b": True, "c": [1, 2]}, {"b": 1, "c": [1, 2]}
    found = differences([Run(Path(), {"config": config}, Metrics({})) for config in configs])
    assert found == [("a", ["null", "\N{EN DASH}"]), ("b", ["true", "1"])]
