"""Reads a run folder: the results of the run, and the figures that follow from them.

    RUN_DIR/run.json    --checked--> Run.record  --> decodes, saved, stall_share, ...
    RUN_DIR/metrics.csv -----------> Run.metrics --> curves

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

from perfect.errors import RunError
from perfect.report.metrics import Metrics, read_metrics
from perfect.report.words import legible

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
    found = [*_problems_in(record)]
    if (status := record.get("status")) not in STATUSES:
        found = [f"status is {status!r:.40}, not one of {', '.join(STATUSES)}", *found]
    return found


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
