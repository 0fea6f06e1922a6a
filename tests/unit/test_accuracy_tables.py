"""The registered accuracy tables: their rows, their statistics, and what README says of them."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.accuracy.evidence import Lines, percent, render, scores
from benchmarks.accuracy.orders import plan_pass
from benchmarks.accuracy.paired import Sample, paired, parity, t_quantile
from benchmarks.accuracy.recipes import Run
from benchmarks.accuracy.registered import (
    CONTROL,
    DECODES,
    KEYED,
    RECIPE,
    Entry,
    registered_tables,
)

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
TABLES = registered_tables()
WITH_CONTROLS = ("parity", "buffer_share", "repeats_and_buffer", "parity_again")


def rates(run: Run) -> Iterator[float]:
    """The learning rate of every step."""
    for phase in run.phases:
        assert phase.lr is not None and phase.steps is not None
        yield from (phase.lr.at_step(step, phase.steps) for step in range(phase.steps))


def reuses(run: Run) -> bool:
    return any(phase.reuse > 1 for phase in run.phases)


def decodes(entry: Entry) -> int:
    """First serves of a run that is not trained, as the training loop counts them."""
    task, run, first, number = entry.task, entry.run, 0, 0
    for phase in run.phases:
        left = phase.steps or 0
        while left:
            seed, buffer = (3, number), run.buffer_batches
            serves = plan_pass(run.order, task.train, task.batch_size, phase.reuse, buffer, seed)
            number += 1
            for _, serve in zip(range(left), serves, strict=False):
                first += int((serve.serves == 0).sum())
                left -= 1
    return first


# ---- rows ---------------------------------------------------------------------------------------


def test_the_registrations_name_every_row_of_their_tables() -> None:
    for table in TABLES.values():
        text = (RESULTS / f"{table.date}_preregistration.md").read_text(encoding="utf-8")
        assert f"{table.date}_{table.name}.jsonl" in text
        assert [e.run.name for e in table.entries if f"`{e.run.name}`" not in text] == []


def test_the_rows_that_reuse_have_a_control_with_their_learning_rate() -> None:
    by_name = {e.run.name: e for name in WITH_CONTROLS for e in TABLES[name].entries}
    reusing = [entry for entry in by_name.values() if reuses(entry.run)]
    assert len(reusing) == 2 + 6 + 14 + 1
    for entry in reusing:
        control = by_name[entry.run.against or ""]
        assert control.task == entry.task and not reuses(control.run)
        # Corners of a curve fall on whole steps: the rows may cut it at different ones.
        theirs = pytest.approx(list(rates(control.run)), abs=0.005 * entry.task.lr)
        assert list(rates(entry.run)) == theirs


def test_the_recipes_save_55_percent_and_equal_decodes_are_equal() -> None:
    for entry in (*TABLES["parity"].entries, *TABLES["buffer_share"].entries):
        if reuses(entry.run):
            saved = 100 - 100 * decodes(entry) / (24 * entry.task.train)
            assert saved == pytest.approx(55, abs=0.4), entry.run.name
    for entry in TABLES["equal_decodes"].entries:
        assert decodes(entry) == DECODES


def test_competitors_have_our_decodes_and_updates() -> None:
    mine = decodes(TABLES["parity"].entries[1])
    for entry in TABLES["competitors"].entries:
        assert len(list(rates(entry.run))) == 600, entry.run.name
        if entry.task.lr == 0.3:  # the order of a pass does not depend on the rate
            assert mine <= decodes(entry) <= 1.01 * mine


# ---- statistics ---------------------------------------------------------------------------------


def test_quantiles_are_those_of_the_printed_tables() -> None:
    printed = {(0.975, 1): 12.706, (0.975, 2): 4.303, (0.95, 11): 1.796, (0.975, 11): 2.201}
    for (p, freedom), value in printed.items():
        assert t_quantile(p, freedom) == pytest.approx(value, abs=5e-4)
        assert t_quantile(1 - p, freedom) == pytest.approx(-value, abs=5e-4)


TWELVE = (0.1, -0.3, 0.4, 0.0, 0.2, -0.2, 0.3, -0.4, 0.1, 0.0, -0.1, 0.3)


def test_the_two_one_sided_tests_reject_exactly_where_the_90_percent_interval_is_inside() -> None:
    for moved in (0.0, 0.3, -0.3, 0.33, 0.34, 0.35, 0.36, 0.4, -0.36, -0.4, 0.6):
        sample = Sample(tuple(value + moved for value in TWELVE))
        low, high = sample.interval(0.90) or (math.nan, math.nan)
        assert (sample.tost(0.5) < 0.05) == (low > -0.5 and high < 0.5), moved


def test_parity_is_called_only_with_all_registered_pairs_and_within_the_margin() -> None:
    assert parity(Sample(TWELVE), 0.5, 12).startswith("parity within 0.5 points (TOST p = ")
    for n in (1, 2, 11):
        assert parity(Sample(TWELVE[:n]), 0.5, 12) == f"no verdict: n = {n} of the 12 registered"
    near = Sample(tuple(value + 0.45 for value in TWELVE))
    assert parity(near, 0.5, 12).startswith("parity not shown")


# ---- the report ---------------------------------------------------------------------------------


def make_line(recipe: str, seed: int, test: float) -> dict[str, Any]:
    return {
        "recipe": recipe, "seed": seed, "test": test, "selection": 0.71, "test_pictures": 10_000,
        "selection_pictures": 10_000, "decodes": 1, "steps": 1, "cpu_seconds": 1.0,
    }  # fmt: skip


def test_a_table_has_no_verdict_until_its_last_registered_pair_is_there(tmp_path: Path) -> None:
    table = TABLES["parity"]
    lines = Lines(tmp_path, table)
    for seed in (*range(14), *range(15, 20)):  # 0 to 2 and 15 to 19 are not registered
        lines.add(make_line(CONTROL, seed, 0.70))
        lines.add(make_line(RECIPE, seed, 0.70 + 0.0005 * (seed % 3)))
    text = render(table, scores([table], tmp_path))
    assert "no verdict: n = 11 of the 12 registered" in text and "TOST" not in text
    lines.add(make_line(CONTROL, 14, 0.70))
    lines.add(make_line(RECIPE, 14, 0.701))
    assert "parity within 0.5 points (TOST p = " in render(table, scores([table], tmp_path))


def test_the_parity_that_readme_claims_is_that_of_the_kept_lines() -> None:
    lines = scores([TABLES["parity_again"]], RESULTS)
    ours, control = (percent(lines[KEYED + name], "pooled") for name in (RECIPE, CONTROL))
    sample = paired(ours, control)
    low, high = sample.interval() or (math.nan, math.nan)
    assert sample.n == 24
    said = f"**{sample.mean:+.2f} [{low:+.2f}, {high:+.2f}]**: parity within 0.5 points"
    assert said in (RESULTS / "README.md").read_text(encoding="utf-8")
