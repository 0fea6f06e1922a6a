"""The lines of finished runs, and the tables that they make.

    results/DATE_TABLE.jsonl, one line a run -> rows -> mean, sd, interval, paired difference

A line that a crash cut short does not count. Only registered rows and seeds are read.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.accuracy.paired import Sample, paired, parity, slope
from benchmarks.accuracy.registered import (
    BUFFERS,
    LONG_FIXED,
    LONG_RULE,
    MARGIN,
    RECIPE,
    REPEATS,
    Entry,
    Table,
    registered_tables,
    repeats_row,
)  # fmt: skip

Line = dict[str, Any]
Scores = Mapping[str, Mapping[int, Line]]
"""Lines by recipe and seed."""


class Lines:
    """One table's file."""

    def __init__(self, folder: Path, table: Table) -> None:
        self.path = folder / f"{table.date}_{table.name}.jsonl"

    def read(self) -> list[Line]:
        if not self.path.exists():
            return []
        whole = [line for line in self.path.read_text().splitlines(True) if line.endswith("\n")]
        return [json.loads(line) for line in whole]

    def add(self, line: Line) -> None:
        """All lines or the old ones: the file is replaced, not appended to."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(known) + "\n" for known in [*self.read(), line]))
        os.replace(partial, self.path)


def scores(tables: Sequence[Table], folder: Path) -> Scores:
    found: dict[str, dict[int, Line]] = {}
    for table in tables:
        names = {entry.run.name for entry in table.entries}
        for line in Lines(folder, table).read():
            if line["recipe"] in names and line["seed"] in table.seeds:
                found.setdefault(line["recipe"], {})[line["seed"]] = line
    return found


def percent(lines: Mapping[int, Line], on: str) -> dict[int, float]:
    """By seed, on `test`, `selection` or both pictures `pooled`."""
    return {seed: 100 * _accuracy(line, on) for seed, line in lines.items()}


def _accuracy(line: Line, on: str) -> float:
    if on != "pooled":
        return line[on]
    right = sum(line[part] * line[f"{part}_pictures"] for part in ("test", "selection"))
    return right / (line["test_pictures"] + line["selection_pictures"])


def render(table: Table, found: Scores) -> str:
    """Markdown; differences are of runs with the same seed."""
    head = (
        "recipe", "decodes", "steps", "CPU s", "n", "selection %", "test %",
        "test + selection % (sd) [95 %]", "against", "difference (sd) [95 %]",
        "difference, test only [95 %]", f"parity within {MARGIN:g}",
    )  # fmt: skip
    rows = [_row(table, entry, found) for entry in table.entries if entry.run.name in found]
    lines = [f"## {table.name}: seeds {table.seeds[0]} to {table.seeds[-1]}\n"]
    lines += [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
    if table.name == "equal_decodes":
        lines += ["", tuned(table.entries, found)]
    elif table.name == "equal_decodes_extended":
        lines += ["", tuned((*registered_tables()["equal_decodes"].entries, *table.entries), found)]
    elif table.name == "repeats_and_buffer":
        lines += ["", trends(found)]
    elif table.name == "competitors":
        lines += ["", *rivals(table.entries, found)]
    elif table.name == "plateau_rule":
        lines += ["", fired(table, found)]
    return "\n".join(lines) + "\n"


def _row(table: Table, entry: Entry, found: Scores) -> list[str]:
    mine, against = found[entry.run.name], entry.run.against or ""
    values = {on: Sample(tuple(percent(mine, on).values())) for on in ("selection", "test")}
    pooled = percent(mine, "pooled")
    cells = [
        entry.run.name, *(f"{_mean(mine, key):.0f}" for key in ("decodes", "steps", "cpu_seconds")),
        str(len(mine)), f"{values['selection'].mean:.2f}", f"{values['test'].mean:.2f}",
        spread(Sample(tuple(pooled.values()))), against,
    ]  # fmt: skip
    control = found.get(against, {})
    differences = paired(pooled, percent(control, "pooled"))
    if not differences.n:
        return [*cells, "", "", ""]
    tests = paired(percent(mine, "test"), percent(control, "test"))
    verdict = parity(differences, MARGIN, len(table.seeds)) if table.parity else ""
    return [*cells, spread(differences, "+"), spread(tests, "+"), verdict]


def tuned(entries: Sequence[Entry], found: Scores) -> str:
    """Our recipe against the row that did best on selection; judged on test."""
    there = [entry for entry in entries if len(found.get(entry.run.name, {})) > 0]
    ours = found.get(RECIPE, {})
    if len(there) < len(entries) or not ours:
        return "Not every row is there yet: no best one is chosen."
    best = max(there, key=lambda entry: _selection(entry, found))
    rates = sorted(e.task.lr for e in there if e.task.batch_size == best.task.batch_size)
    batches = sorted({e.task.batch_size for e in there})
    edges = [
        f" Its {what} is at the edge of the grid."
        for what, value, known in (
            ("rate", best.task.lr, rates), ("batch size", best.task.batch_size, batches)
        )
        if len(known) > 1 and value in (known[0], known[-1])
    ]  # fmt: skip
    test = percent(found[best.run.name], "test")
    return (
        f"Best on selection: {best.run.name}.{''.join(edges)} Our recipe on test, minus it:"
        f" {spread(paired(percent(ours, 'test'), test), '+')}, n = {len(ours.keys() & test)}."
    )


def _selection(entry: Entry, found: Scores) -> float:
    return Sample(tuple(percent(found[entry.run.name], "selection").values())).mean


def rivals(entries: Sequence[Entry], found: Scores) -> list[str]:
    """Our recipe against the best of all others, then against each way at its best rate."""
    ways: dict[str, list[Entry]] = {}
    for entry in entries:
        ways.setdefault(entry.run.name.rsplit(", rate ", 1)[0], []).append(entry)
    others = [entry for entry in entries if not entry.run.name.startswith("our recipe")]
    return [tuned(others, found), "", *(f"- {tuned(way, found)}" for way in ways.values())]


def fired(table: Table, found: Scores) -> str:
    """In how many runs the plateau rule ended the reuse, and what that was worth."""
    ruled, fixed = found.get(LONG_RULE, {}), found.get(LONG_FIXED, {})
    if ruled.keys() & fixed.keys() != set(table.seeds):
        return "Not every pair is there yet: nothing is said of the rule."
    when = [
        f"{at:.1f}" for line in ruled.values() for at, why in line["switches"] if why == "plateau"
    ]
    gain = paired(percent(ruled, "pooled"), percent(fixed, "pooled"))
    return (
        f"The rule fired in {len(when)} of {len(ruled)} runs (at epoch {', '.join(when) or '-'})."
        f" The rule minus the latest start: {spread(gain, '+')} points, for"
        f" {_mean(ruled, 'decodes') - _mean(fixed, 'decodes'):+,.0f} decodes."
    )


def trends(found: Scores) -> str:
    """What a doubling of the repeats does to accuracy, by buffer: the two tests of R x K."""
    doublings = [math.log2(reuse) for reuse in REPEATS]
    by_buffer: dict[int, dict[int, float]] = {}
    for buffer in BUFFERS:
        cells = [percent(found.get(repeats_row(r, buffer), {}), "pooled") for r in REPEATS]
        seeds = set(cells[0]).intersection(*cells[1:])
        by_buffer[buffer] = {
            seed: slope(doublings, [cell[seed] for cell in cells]) for seed in seeds
        }
    small, large = by_buffer[BUFFERS[0]], by_buffer[BUFFERS[-1]]
    gain = paired(large, small)
    if not gain.n:
        return "No seed has every cell yet: no trend is said."
    said = ", ".join(
        f"{spread(Sample(tuple(by_buffer[b].values())), '+')} with a buffer of {b}" for b in BUFFERS
    )
    return (
        f"Points a doubling of R, n = {gain.n}: {said}. A buffer of {BUFFERS[-1]} instead of"
        f" {BUFFERS[0]} changes that by {spread(gain, '+')}."
    )


def spread(sample: Sample, sign: str = "") -> str:
    interval = sample.interval()
    if interval is None:
        return f"{sample.mean:{sign}.2f}"
    low, high = interval
    return f"{sample.mean:{sign}.2f} ({sample.sd:.2f}) [{low:{sign}.2f}, {high:{sign}.2f}]"


def _mean(lines: Mapping[int, Line], key: str) -> float:
    return Sample(tuple(line[key] for line in lines.values())).mean
