"""Reads metrics.csv into columns, and computes the rates between its rows.

    step,wall_seconds,decoded,served,stall_seconds,val_accuracy     Metrics: a column a name
    100 ,10          ,1000   ,3000  ,1            ,
    100 ,10          ,       ,      ,             ,0.5              (a row of validation)
    800 ,40          ,7000   ,18000 ,4            ,
         `--- 30 s --' `---- 6000 decoded, 15000 served, 3 s stalled: Rates

Counters only grow within a sitting, so a rate is a difference between two rows and no sample is
counted twice. A rate that cannot be known is NaN, never a guess.
"""

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

LARGEST = 1e100
"""Figures show smaller numbers."""
Column = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Metrics:
    """The columns of metrics.csv. An empty cell is NaN. A cell that says nan, inf or 1e300 is inf:
    it has a value, but one that no figure can show."""

    columns: Mapping[str, Column]

    def pairs(self, x: str, y: str) -> tuple[Column, Column]:
        """Return the rows that have a number in both columns; none if a column is missing."""
        if x not in self.columns or y not in self.columns:
            return np.empty(0), np.empty(0)
        known = np.isfinite(self.columns[x]) & np.isfinite(self.columns[y])
        return self.columns[x][known], self.columns[y][known]

    def first_not_finite(self, name: str) -> int | None:
        """Return the first step whose value is not a finite number."""
        if name not in self.columns:
            return None
        steps = self.columns["step"][np.isinf(self.columns[name])]
        return next((int(step) for step in steps if math.isfinite(step)), None)


def read_metrics(path: Path) -> Metrics:
    """Read metrics.csv. A row that is cut short, as by a kill of the run, is left out."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.reader(file)
        head = next(rows, ["step"])
        if "step" not in head:
            raise ValueError("the first row does not name a column 'step'")
        body = [
            [_cell(text, rows.line_num, name) for text, name in zip(row, head, strict=True)]
            for row in rows
            if len(row) == len(head)
        ]
    table = np.array(body, dtype=float).reshape(-1, len(head))
    return Metrics({name: table[:, i] for i, name in enumerate(head)})


def _cell(text: str, line: int, name: str) -> float:
    if not text.strip():
        return math.nan
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"line {line}: {name}: {text[:40]!r} is not a number") from None
    return value if abs(value) < LARGEST else math.inf


@dataclass(frozen=True, slots=True)
class RowRates:
    """What the loader did between rows: element i holds from seconds[i] to seconds[i + 1]."""

    seconds: Column
    decoded: Column
    """Samples per second."""
    served: Column
    stalled: Column
    """The fraction of the time that was spent waiting."""


def rates(metrics: Metrics, intervals: int = 60) -> RowRates | None:
    """Return the rates between rows, in at most `intervals` intervals. A rate is NaN if a clock or
    a counter went back, which may happen when a run is resumed."""
    names = ("wall_seconds", "decoded", "served", "stall_seconds")
    if any(name not in metrics.columns for name in names):
        return None
    table = np.stack([metrics.columns[name] for name in names])
    table = table[:, np.isfinite(table).all(axis=0)]
    if table.shape[1] < 2:
        return None
    table = table[:, np.unique(np.linspace(0, table.shape[1] - 1, intervals + 1).astype(int))]
    # There is no interval between rows of the same moment (training and validation of a step).
    table = table[:, np.concatenate([[True], np.diff(table[0]) != 0])]
    change = np.diff(table, axis=1)
    change[:, (change[0] < 0) | (change[1:] < 0).any(axis=0)] = np.nan
    seconds, decoded, served, stalled = change
    if not np.isfinite(seconds).any():
        return None
    return RowRates(table[0], decoded / seconds, served / seconds, stalled / seconds)
