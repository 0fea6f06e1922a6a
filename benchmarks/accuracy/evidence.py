"""The lines of finished runs, and the tables that they make.

    results/2026-11-22_TABLE.jsonl, one line a run -> rows -> mean, sd, interval, paired difference

A line that a crash cut short does not count. Only registered rows and seeds are read.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accuracy.paired import Sample, paired, parity
from accuracy.registered import CONTROL, MARGIN, RECIPE, Entry, Table

DATE = "2026-11-22"
"""Of the registration."""

Line = dict[str, Any]
Scores = Mapping[str, Mapping[int, Line]]
"""Lines by recipe and seed."""


class Lines:
    """One file."""

    def __init__(self, folder: Path, table: str) -> None:
        self.path = folder / f"{DATE}_{table}.jsonl"

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
        for line in Lines(folder, table.name).read():
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
        lines += ["", tuned(table, found)]
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
    judged = against == CONTROL
    verdict = parity(differences, MARGIN, len(table.seeds)) if judged else ""
    return [*cells, spread(differences, "+"), spread(tests, "+"), verdict]


def tuned(table: Table, found: Scores) -> str:
    """Our recipe against the row without reuse that did best on selection; judged on test."""
    there = [entry for entry in table.entries if len(found.get(entry.run.name, {})) > 0]
    ours = found.get(RECIPE, {})
    if len(there) < len(table.entries) or not ours:
        return "Not every row is there yet: no best one is chosen."

    def selection(entry: Entry) -> float:
        return Sample(tuple(percent(found[entry.run.name], "selection").values())).mean

    best = max(there, key=selection)
    rates = sorted(e.task.lr for e in there if e.task.batch_size == best.task.batch_size)
    edge = " Its rate is at the edge of the grid." if best.task.lr in (rates[0], rates[-1]) else ""
    test = percent(found[best.run.name], "test")
    return (
        f"Best on selection: {best.run.name}.{edge} Our recipe on test, minus it:"
        f" {spread(paired(percent(ours, 'test'), test), '+')}, n = {len(ours.keys() & test)}."
    )


def spread(sample: Sample, sign: str = "") -> str:
    interval = sample.interval()
    if interval is None:
        return f"{sample.mean:{sign}.2f}"
    low, high = interval
    return f"{sample.mean:{sign}.2f} ({sample.sd:.2f}) [{low:{sign}.2f}, {high:{sign}.2f}]"


def _mean(lines: Mapping[int, Line], key: str) -> float:
    return Sample(tuple(line[key] for line in lines.values())).mean
