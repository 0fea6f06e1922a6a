"""A run with a memory budget: what it leaves in run.json and in its report."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.run_folders import stop_after

Train = Callable[..., tuple[int, Path]]
Recipe = dict[str, Any]
PARTS = ("compute_seconds", "transfer_seconds", "input_seconds", "planning_seconds")


@pytest.fixture
def phased(recipe: Recipe, share: Callable[[int, Recipe], str]) -> Recipe:
    """18 steps of 10 pictures, 5 of 12."""
    recipe["loader"]["batch_size"] = 10
    recipe["phases"][0]["passes"] = 1
    recipe["phases"][1] |= {"passes": 1, "batch_size": 12}
    recipe["offload"] = {"budget": share(60, recipe)}
    return recipe


def section(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run.json").read_text())["offload"]


def runs_of(found: dict[str, Any]) -> Counter[str]:
    """By inputs. The first step makes the states, so it has a plan of its own."""
    ran = Counter[str]()
    for row in found["plans"]:
        ran[row["inputs"]] += row["runs"]
    return ran


def check_sums(found: dict[str, Any], run: dict[str, Any]) -> None:
    """What must hold of every record, however often its run was stopped."""
    assert found["runs"] == run["steps"] == sum(row["runs"] for row in found["plans"])
    assert [phase["runs"] for phase in found["phases"]] == [18, 5]
    for part in (*PARTS, "seconds"):
        assert found[part] == pytest.approx(sum(phase[part] for phase in found["phases"]))
    assert sum(found[part] for part in PARTS) < found["seconds"] < run["wall_seconds"]
    assert found["input_seconds"] == pytest.approx(run["stall_seconds"], abs=1e-3)


def test_a_run_with_a_budget_says_where_its_time_and_its_bytes_went(
    train: Train, phased: Recipe, read_run: Callable[[Path], dict[str, Any]]
) -> None:
    code, folder = train(phased)
    assert code == 0
    found = section(folder)
    check_sums(found, read_run(folder))
    assert runs_of(found) == {"(10, 3, 16, 16), (10,)": 18, "(12, 3, 16, 16), (12,)": 5}
    assert found["plans_made"] == len(found["plans"])
    assert found["phases"][0]["inputs"] == ["(10, 3, 16, 16), (10,)"]
    assert found["phases"][1]["inputs"] == ["(12, 3, 16, 16), (12,)"]
    assert found["smallest_bytes"] <= found["peak_bytes"] <= found["budget_bytes"]
    assert found["held_bytes"] <= found["peak_bytes"] < found["unmoved_bytes"]
    assert 0 < found["transfer_share"] < 1 and found["predicted_seconds"] > 0
    drawn = [row["picture"] for row in found["plans"] if "picture" in row]
    assert {path.name for path in folder.glob("*.svg")} == {*drawn} != set()
    page = (folder / "report.html").read_text()
    assert "Waiting for transfers" in page and "A step was predicted to take" in page
    assert page.count("<figure class=broad>") == len(drawn)


def test_a_run_that_was_stopped_has_the_record_of_one_that_was_not(
    train: Train, phased: Recipe, read_run: Callable[[Path], dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with monkeypatch.context() as patch:
        stop_after(13, patch)
        code, folder = train(phased)
    assert code == 130
    assert section(folder)["runs"] == 13
    code, folder = train(phased)
    assert code == 0 and read_run(folder)["resumed_at"] == [10]  # three steps were lost
    found = section(folder)
    check_sums(found, read_run(folder))
    assert [*runs_of(found).values()] == [18, 5]
    # Batches of 10 were planned in both sittings, and have their rows once.
    assert found["plans_made"] > len(found["plans"])
    assert all((folder / row["picture"]).is_file() for row in found["plans"] if "picture" in row)


def test_a_run_without_a_budget_has_no_such_section(
    train: Train, phased: Recipe, read_run: Callable[[Path], dict[str, Any]]
) -> None:
    del phased["offload"]
    _, folder = train(phased)
    assert "offload" not in read_run(folder)
    assert "ransfer" not in (folder / "report.html").read_text()
    assert not [*folder.glob("*.svg")]
