"""What the registered accuracy tables say of the lines that were measured."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from accuracy.evidence import Lines, percent, render, rivals, scores, trends, tuned  # noqa: E402
from accuracy.registered import (  # noqa: E402
    BUFFERS,
    CONTROL,
    RECIPE,
    REPEATS,
    registered_tables,
    repeats_row,
)

PARITY = registered_tables()["parity"]
EQUAL = registered_tables()["equal_decodes"]
COMPETITORS = registered_tables()["competitors"]
EXTENDED = registered_tables()["equal_decodes_extended"]


def line(recipe: str, seed: int, test: float, selection: float) -> dict[str, Any]:
    return {
        "recipe": recipe, "seed": seed, "test": test, "selection": selection,
        "test_pictures": 10_000, "selection_pictures": 10_000,
        "decodes": 1, "steps": 1, "cpu_seconds": 1.0, "commit": "abc",
    }  # fmt: skip


def test_parity_has_no_verdict_until_the_last_registered_pair_is_there(tmp_path: Path) -> None:
    lines = Lines(tmp_path, PARITY)
    for seed in range(20):  # 0 to 2 and 15 to 19 are not registered
        lines.add(line(CONTROL, seed, 0.70, 0.71))
    for seed in (*range(3), *range(3, 14), *range(15, 20)):
        lines.add(line(RECIPE, seed, 0.70 + 0.0005 * (seed % 3), 0.71))
    text = render(PARITY, scores([PARITY], tmp_path))
    assert "no verdict: n = 11 of the 12 registered" in text
    assert "TOST" not in text
    lines.add(line(RECIPE, 14, 0.701, 0.71))
    text = render(PARITY, scores([PARITY], tmp_path))
    assert "parity within 0.5 points (TOST p = " in text
    assert "n = 12)" in text


def test_pooled_accuracy_counts_pictures_not_sets() -> None:
    uneven = {**line(RECIPE, 3, 0.8, 0.5), "selection_pictures": 5000}
    assert percent({3: uneven}, "pooled")[3] == pytest.approx(70.0)


def test_the_tuned_opponent_is_chosen_on_selection_and_judged_on_test(tmp_path: Path) -> None:
    mine = Lines(tmp_path, PARITY)
    for seed in (3, 4, 5):
        mine.add(line(RECIPE, seed, 0.700 + 0.001 * seed, 0.1))
    theirs = Lines(tmp_path, EQUAL)
    for number, entry in enumerate(EQUAL.entries):
        if number == 8:
            found = scores([PARITY, EQUAL], tmp_path)
            assert (
                tuned(EQUAL.entries, found) == "Not every row is there yet: no best one is chosen."
            )
        for seed in (3, 4, 5):
            best = number == 4  # the middle rate of the middle batch
            theirs.add(line(entry.run.name, seed, 0.65 if best else 0.9, 0.7 if best else 0.6))
    said = tuned(EQUAL.entries, scores([PARITY, EQUAL], tmp_path))
    assert said.startswith(f"Best on selection: {EQUAL.entries[4].run.name}. Our recipe on test")
    assert "+5.40 (0.10)" in said


def test_a_best_row_at_the_edge_of_rates_and_batches_is_said_to_be_there() -> None:
    every = [*EQUAL.entries, *EXTENDED.entries]
    found = {RECIPE: {3: line(RECIPE, 3, 0.7, 0.7)}}
    for entry in every:
        best = (entry.task.batch_size, entry.task.lr) == (40, 0.0265)
        found[entry.run.name] = {3: line(entry.run.name, 3, 0.6, 0.61 if best else 0.6)}
    said = tuned(every, found)
    assert "batch 40, rate 0.0265. Its rate is at the edge of the grid." in said
    assert "Its batch size is at the edge of the grid." in said
    # Of the old rows alone another one is best, and the extension's table asks about all 14.
    assert said.removeprefix("Best") in render(EXTENDED, found)
    missing = {name: lines for name, lines in found.items() if "rate 0.402" not in name}
    assert "Not every row is there yet" in render(EXTENDED, missing)


def test_points_a_doubling_of_the_repeats_come_from_seeds_that_have_every_cell() -> None:
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for reuse in REPEATS:
        for buffer in BUFFERS:
            lost = (0.02 + 0.001 * buffer) * math.log2(reuse)
            name = repeats_row(reuse, buffer)
            found[name] = {s: line(name, s, 0.7 - lost, 0.7 - lost) for s in (3, 4)}
    del found[repeats_row(8, 12)][4]
    said = trends(found)
    assert said.startswith("Points a doubling of R, n = 1: ")
    assert "-2.10 with a buffer of 1, " not in said  # two seeds there: with their interval
    assert "-3.20 with a buffer of 12." in said
    assert said.endswith("changes that by -1.10.")
    del found[repeats_row(8, 12)][3]
    assert trends(found) == "No seed has every cell yet: no trend is said."


def test_each_competitor_is_met_at_its_best_rate_and_the_best_of_all_first() -> None:
    found = {RECIPE: {3: line(RECIPE, 3, 0.71, 0.7)}}
    for entry in COMPETITORS.entries:
        name = entry.run.name
        best = name in ("example echoing, cosine, rate 0.15", "our recipe, cosine, rate 0.3")
        found[name] = {3: line(name, 3, 0.68 if best else 0.66, 0.69 if best else 0.67)}
    first, _, *each = rivals(COMPETITORS.entries, found)
    assert first == (
        "Best on selection: example echoing, cosine, rate 0.15. Its rate is at the edge of the"
        " grid. Our recipe on test, minus it: +3.00, n = 1."
    )
    assert len(each) == 9
    assert "our recipe, cosine, rate 0.3. Our recipe on test, minus it: +3.00" in each[-1]
    assert first in render(COMPETITORS, found)
