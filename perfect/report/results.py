"""Reads a run folder: the results of the run, and the figures that follow from them.

A figure is None if the run did not get that far. A folder without a run, or with a damaged one, is
a RunError that says all that is wrong. Decodes saved are counted against decoding at every serve;
decodes that were made twice (after a resume) count twice.
"""

import csv
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from perfect.errors import RunError
from perfect.report.words import legible

MOST_SHOWN = 1e100
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
    return value if abs(value) < MOST_SHOWN else math.inf


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


STATUSES = ("completed", "running", "interrupted", "stopped", "failed")
KINDS = MappingProxyType({"list": list, "mapping": dict, "text": str})
LARGEST, DEEPEST, MOST_BYTES = 1 << 63, 32, 64 << 20
"""No record has larger numbers, deeper nests or more bytes."""
SHAPE: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("phases", "switches", "trace", "resumed_at", "config.phases"), "list"),
        **dict.fromkeys(
            ("environment", "config", "config.phases[]", "chosen", "offload"), "mapping"),
        **dict.fromkeys(
            ("accuracy", "best_accuracy", "perplexity", "steps", "wall_seconds",
             "stall_seconds", "serve_seconds", "decoded_samples", "extra_decodes",
             "served_samples", "buffer_bytes", "fresh_passes", "train_samples",
             "cached_samples", "skipped_samples", "process_peak_bytes",
             "allocated_peak_bytes", "phases[].first_step", "phases[].last_step",
             "phases[].lr_start", "phases[].lr_end", "offload.transfer_seconds",
             "offload.peak_bytes", "offload.budget_bytes"), "number"),
        "accuracy_on": "text",
    }
)  # fmt: skip
NEEDED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "phases[]": ("name", "reuse", "first_step", "last_step"),
        "switches[]": ("step", "reason"),
        "trace[]": ("seen",),
        "offload.phases[]": ("name", "seconds"),
        "offload.plans[]": ("inputs", "part", "runs"),
    }
)
"""What the mappings in lists must have."""


@final
@dataclass(frozen=True, slots=True)
class Run:
    """The results of a run. A figure is None if the run did not get that far."""

    folder: Path
    record: Mapping[str, Any]  # run.json: read_run checked the kinds of its values
    metrics: Metrics

    @property
    def name(self) -> str:
        return legible(str(self.record.get("name") or self.folder.name))

    @property
    def status(self) -> str:
        return self.record["status"]

    @property
    def completed(self) -> bool:
        return self.status == "completed"

    def number(self, key: str) -> float | None:
        value = self.record.get(key)
        return value if value is not None and math.isfinite(value) else None

    def rows(self, key: str) -> list[dict[str, Any]]:  # Any: rows of run.json
        return self.record.get(key) or []

    def table(self, key: str) -> dict[str, Any]:  # Any: a part of run.json
        return self.record.get(key) or {}

    @property
    def in_memory(self) -> bool:
        """Whether the data set was in memory, so that "decoded" counts first serves."""
        return bool(self.record.get("in_memory"))

    @property
    def decodes(self) -> float | None:
        """All decodes: those for first serves, and those made again after a resume."""
        decoded = self.number("decoded_samples")
        return None if decoded is None else decoded + (self.number("extra_decodes") or 0)

    @property
    def saved(self) -> float | None:
        """The share of serves that needed no decode."""
        served, decodes = self.number("served_samples"), self.decodes
        return 1 - decodes / served if served and decodes is not None else None

    @property
    def fresh_passes(self) -> float | None:
        fresh = self.number("fresh_passes")
        return self.in_passes("decoded_samples") if fresh is None else fresh

    def in_passes(self, key: str) -> float | None:
        """A number of samples, in passes through the training set."""
        samples, size = self.number(key), self.number("train_samples")
        return samples / size if samples is not None and size else None

    @property
    def stall_share(self) -> float | None:
        stall, wall = self.number("stall_seconds"), self.number("wall_seconds")
        return stall / wall if stall is not None and wall else None

    @property
    def transfer_share(self) -> float | None:
        """The share of the wall time spent waiting for transfers. None if nothing was offloaded."""
        stall, wall = self.table("offload").get("transfer_seconds"), self.number("wall_seconds")
        return stall / wall if stall is not None and wall else None


def read_run(folder: Path) -> Run:
    """Read a run folder. Raise RunError with all that is wrong with it."""
    try:
        if not (path := folder / "run.json").is_file():
            what = "holds no run.json" if folder.is_dir() else "is no folder"
            raise RunError(f"{what}; give the folder of a run, as perfect-train made it")
        record = read_record(path)
    except OSError as error:
        raise RunError(f"run.json cannot be read ({error.strerror}); make it readable") from error
    except (ValueError, RecursionError) as error:
        raise RunError(f"run.json is damaged ({error}); delete it and run again") from error
    if problems := _problems(record):
        raise RunError(f"run.json is damaged ({', '.join(problems[:9])}); delete it and run again")
    try:
        path = folder / "metrics.csv"
        metrics = read_metrics(path) if path.is_file() else Metrics({})
    except (OSError, ValueError, csv.Error) as error:
        raise RunError(f"metrics.csv cannot be read ({error}); repair or remove it") from error
    return Run(folder, record, metrics)


def read_record(path: Path) -> Any:
    """Read a record, whatever the file holds. Numbers that are not finite become None."""
    with path.open("rb") as file:
        text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES >> 20} MiB")
    record = json.loads(text.decode(), parse_constant=lambda _: None)
    json.dumps(record, allow_nan=False, ensure_ascii=False).encode()  # as compare.json has it
    return record


def _problems(record: object) -> list[str]:
    if not isinstance(record, dict):
        return ["it is not an object"]
    problems = [*_problems_in(record)]
    if (status := record.get("status")) not in STATUSES:
        problems = [f"status is {status!r:.40}, not one of {', '.join(STATUSES)}", *problems]
    return problems


def _problems_in(value: Any, at: str = "", path: str = "", depth: int = 0) -> Iterator[str]:
    """Yield what is wrong with a part of a record. `at` is its place, `path` that of all rows."""
    if depth > DEEPEST:
        yield f"{at[:40]} is nested more than {DEEPEST} deep"
        return
    given = value is not None or path.endswith("[]")
    if given and path in SHAPE and not _is_of(kind := SHAPE[path], value):
        yield f"{at} is {str(value)[:40]!r}, not a {kind}"
    if needed := NEEDED.get(path):
        missing = [n for n in needed if not isinstance(value, dict) or value.get(n) is None]
        if missing:
            yield f"{at} lacks {' and '.join(missing)}"
    if isinstance(value, dict):
        for key, part in value.items():
            place, of_all = (f"{whole}.{key}".lstrip(".") for whole in (at, path))
            yield from _problems_in(part, place, of_all, depth + 1)
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from _problems_in(part, f"{at}[{number}]", f"{path}[]", depth + 1)


def _is_of(kind: str, value: Any) -> bool:
    if kind == "number":
        return type(value) in (int, float) and -LARGEST < value < LARGEST
    return isinstance(value, KINDS[kind])
