"""The rows of the accuracy benchmarks: every one that reuses has its control."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from accuracy.orders import plan  # noqa: E402
from accuracy.pilot import PILOT  # noqa: E402
from accuracy.recipes import Run, Task  # noqa: E402
from accuracy.registered import (  # noqa: E402
    BUFFERS,
    CONTROL,
    DECODES,
    RECIPE,
    REPEATS,
    SMALL_BUFFER,
    Entry,
    registered_tables,
    repeats_row,
)

LATEST = "T120 switch at the latest start"
TABLES = registered_tables()
WITH_CONTROLS = ("parity", "buffer_share", "repeats_and_buffer", "parity_again")


def curve(run: Run) -> Iterator[tuple[float, int | None]]:
    """Learning rate and batch size of every step."""
    for phase in run.phases:
        assert phase.lr is not None
        assert phase.steps is not None
        for step in range(phase.steps):
            yield phase.lr.at_step(step, phase.steps), phase.batch_size


def reuses(run: Run) -> bool:
    return any(phase.reuse > 1 for phase in run.phases)


def check_control(run: Run, control: Run, peak: float) -> None:
    assert not reuses(control)
    mine, theirs = list(curve(run)), list(curve(control))
    assert [batch for _, batch in mine] == [batch for _, batch in theirs]
    # Corners of a curve fall on whole steps: the rows may cut it at different ones.
    assert [lr for lr, _ in mine] == pytest.approx([lr for lr, _ in theirs], abs=0.005 * peak)
    assert run.phases[-1].ema == control.phases[-1].ema


def test_the_registrations_name_every_row_of_their_tables() -> None:
    rows = dict.fromkeys(("2026-11-22", "2026-11-24", "2026-11-26"), 0)
    for table in TABLES.values():
        path = ROOT / "benchmarks" / "results" / f"{table.date}_preregistration.md"
        text = path.read_text()
        assert f"{table.date}_{table.name}.jsonl" in text
        for entry in table.entries:
            assert f"`{entry.run.name}`" in text
        rows[table.date] += len(table.entries)
    assert rows == {"2026-11-22": 3 + 9 + 8, "2026-11-24": 5 + 14 + 27 + 4, "2026-11-26": 2}
    names = [entry.run.name for table in TABLES.values() for entry in table.entries]
    assert len(set(names)) == len(names)


def test_the_registered_rows_that_reuse_have_a_control_with_their_learning_rate() -> None:
    by_name = {e.run.name: e for name in WITH_CONTROLS for e in TABLES[name].entries}
    reusing = [entry for entry in by_name.values() if reuses(entry.run)]
    assert len(reusing) == 2 + 6 + 14 + 1
    for entry in reusing:
        control = by_name[entry.run.against or ""]
        assert control.task == entry.task
        check_control(entry.run, control.run, entry.task.lr)


def test_parity_compares_twelve_batches_and_three_with_none_over_twelve_new_seeds() -> None:
    table = TABLES["parity"]
    assert [entry.run.name for entry in table.entries] == [CONTROL, RECIPE, SMALL_BUFFER]
    assert [entry.run.buffer_batches for entry in table.entries] == [1, 12, 3]
    assert len(table.seeds) == 12
    assert not {0, 1, 2} & set(table.seeds)
    order = [(seed, entry.run.name) for seed, entry in table.in_order()]
    assert order[:4] == [(3, CONTROL), (3, RECIPE), (3, SMALL_BUFFER), (4, CONTROL)]
    assert len(order) == 36


def test_parity_is_judged_again_over_seeds_that_no_other_table_has() -> None:
    again = TABLES["parity_again"]
    others = {seed for table in TABLES.values() if table is not again for seed in table.seeds}
    assert len(again.seeds) == 24
    assert not {0, 1, 2, *others} & set(again.seeds)
    assert {name for name, table in TABLES.items() if table.parity} == {"parity", "parity_again"}


def decodes(task: Task, run: Run) -> int:
    """First serves of a run that is not trained, as the training loop counts them."""
    first, number = 0, 0
    for phase in run.phases:
        assert phase.steps is not None
        left = phase.steps
        while left:
            serves = plan(
                run.order, task.train, task.batch_size, phase.reuse, run.buffer_batches, (3, number)
            )
            number += 1
            for _, serve in zip(range(left), serves, strict=False):
                first += int((serve.serves == 0).sum())
                left -= 1
    return first


def saved(entry: Entry) -> float:
    return 100 - 100 * decodes(entry.task, entry.run) / (24 * entry.task.train)


def test_the_registered_recipes_save_55_percent_of_the_decodes() -> None:
    entries = [*TABLES["parity"].entries, *TABLES["buffer_share"].entries]
    for entry in entries:
        if reuses(entry.run):
            assert saved(entry) == pytest.approx(55, abs=0.4), entry.run.name


def test_equal_decodes_are_equal_for_every_batch_size_and_rate() -> None:
    entries = TABLES["equal_decodes"].entries
    settings = {(entry.task.batch_size, entry.task.lr) for entry in entries}
    assert len(settings) == 9
    assert {batch for batch, _ in settings} == {80, 144, 320}
    for entry in entries:
        assert decodes(entry.task, entry.run) == DECODES
        assert entry.task.train == PILOT.train


def test_the_extension_goes_past_the_rate_and_the_batch_that_were_at_the_edge() -> None:
    entries = TABLES["equal_decodes_extended"].entries
    settings = [(entry.task.batch_size, entry.task.lr) for entry in entries]
    assert settings == [(80, 0.0375), (80, 0.01875), (40, 0.0265), (40, 0.053), (40, 0.106)]
    for entry in entries:
        assert decodes(entry.task, entry.run) == DECODES
        assert entry.run.against == RECIPE


def test_every_cell_of_repeats_and_buffer_is_a_row_and_repeats_save_what_they_should() -> None:
    entries = {entry.run.name: entry for entry in TABLES["repeats_and_buffer"].entries}
    entries[SMALL_BUFFER] = TABLES["parity"].entries[2]
    assert len(entries) == len(REPEATS) * len(BUFFERS) == 15
    for reuse in REPEATS:
        for buffer in BUFFERS:
            entry = entries[repeats_row(reuse, buffer)]
            assert entry.run.buffer_batches == buffer
            assert {phase.reuse for phase in entry.run.phases} == {reuse, 1}
            # A large buffer has decoded ahead for serves that the switch cuts off.
            planned = 100 * (1 - 1 / reuse) * 19.96 / 24
            assert -1.3 < saved(entry) - planned < 0.4


def test_competitors_have_our_decodes_and_updates_at_three_rates_and_two_schedules() -> None:
    entries = TABLES["competitors"].entries
    recipe = TABLES["parity"].entries[1]
    mine = decodes(recipe.task, recipe.run)
    assert len(entries) == (4 * 2 + 1) * 3
    assert {entry.task.lr for entry in entries} == {0.15, 0.3, 0.6}
    for entry in entries:
        assert len(list(curve(entry.run))) == 600, entry.run.name
        assert entry.run.against == RECIPE
        assert entry.run.phases[-1].ema
        assert max(rate for rate, _ in curve(entry.run)) == pytest.approx(entry.task.lr, rel=0.02)
        # The order of a pass does not depend on the rate.
        if entry.task.lr == 0.3:
            assert mine <= decodes(entry.task, entry.run) <= 1.01 * mine
    for entry in entries:
        persists = entry.run.name.startswith("minibatch persistency")
        assert all(phase.reaugment != persists for phase in entry.run.phases)
    ours = list(curve(TABLES["parity"].entries[1].run))
    under = [e for e in entries if "our rates, rate 0.3" in e.run.name]
    assert len(under) == 4
    for entry in under:
        rates = [rate for rate, _ in curve(entry.run)]
        assert rates == pytest.approx([rate for rate, _ in ours], abs=0.0015)


def test_the_plateau_rule_runs_long_and_has_the_latest_start_as_its_control() -> None:
    by_name = {entry.run.name: entry.run for entry in TABLES["plateau_rule"].entries}
    ruled, fixed = by_name["T120 switch by the plateau rule"], by_name[LATEST]
    assert ruled.phases == fixed.phases and fixed.plateau is None
    assert ruled.plateau is not None and ruled.plateau.not_before == 30
    for run in by_name.values():
        assert sum(phase.steps or 0 for phase in run.phases) == 3000
    saved = sum((phase.steps or 0) / phase.reuse for phase in fixed.phases)
    assert saved < sum((p.steps or 0) / p.reuse for p in by_name["T120 switch at 72"].phases)


def test_buffers_of_larger_sets_are_three_and_twelve_batches_and_12_percent() -> None:
    entries = TABLES["buffer_share"].entries
    for train, share, steps in ((24_000, 9, 1800), (40_000, 15, 3000)):
        mine = [entry for entry in entries if entry.task.train == train]
        assert [entry.run.buffer_batches for entry in mine] == [1, 3, 12, share]
        assert share * PILOT.batch_size == 0.12 * train
        assert {len(list(curve(entry.run))) for entry in mine} == {steps}
