"""Reads a run folder: the results of the run, and the figures that follow from them.

    RUN_DIR/run.json    --checked--> Run.record  --> decodes, saved, stall_share, ...
    RUN_DIR/metrics.csv -----------> Run.metrics --> curves

A figure is None if the run did not get that far. A folder without a run, or with a damaged one, is
a RunError that says all that is wrong. Decodes saved are counted against decoding at every serve;
decodes that were made twice (after a resume) count twice.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

from perfect.errors import RunError
from perfect.report.metrics import Metrics, read_metrics

STATUSES = ("completed", "running", "interrupted", "stopped", "failed")
KINDS = MappingProxyType({"number": (int, float), "list": (list,), "mapping": (dict,)})
SHAPE: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("accuracy", "best_accuracy", "perplexity", "steps", "wall_seconds",
             "stall_seconds", "serve_seconds", "decoded_samples", "extra_decodes",
             "served_samples", "buffer_bytes", "fresh_passes", "train_samples",
             "cached_samples", "skipped_samples", "process_peak_bytes",
             "allocated_peak_bytes"), "number"),
        **dict.fromkeys(("phases", "switches", "trace", "resumed_at"), "list"),
        **dict.fromkeys(("environment", "config", "chosen", "offload"), "mapping"),
    }
)  # fmt: skip


@final
@dataclass(frozen=True, slots=True)
class Run:
    """The results of a run. A figure is None if the run did not get that far."""

    folder: Path
    record: Mapping[str, Any]  # run.json: read_run checked the kinds of its values
    metrics: Metrics

    @property
    def name(self) -> str:
        return str(self.record.get("name") or self.folder.name)

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
    path = folder / "run.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        what = "holds no run.json" if folder.is_dir() else "is no folder"
        raise RunError(f"{what}; give the folder of a run, as perfect-train made it") from None
    except OSError as error:
        raise RunError(f"run.json cannot be read ({error.strerror}); make it readable") from error
    except ValueError as error:
        raise RunError(f"run.json is damaged ({error}); delete it and run again") from error
    if problems := _problems(record):
        raise RunError(f"run.json is damaged ({', '.join(problems)}); delete it and run again")
    try:
        metrics = read_metrics(folder / "metrics.csv")
    except FileNotFoundError:
        metrics = Metrics({})
    except (OSError, ValueError) as error:
        raise RunError(f"metrics.csv cannot be read ({error}); repair or remove it") from error
    return Run(folder, record, metrics)


def _problems(record: object) -> list[str]:
    if not isinstance(record, dict):
        return ["it is not an object"]
    found = []
    if record.get("status") not in STATUSES:
        found.append(f"status is {record.get('status')!r}, not one of {', '.join(STATUSES)}")
    for key, kind in SHAPE.items():
        value = record.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, KINDS[kind])):
            found.append(f"{key} is {str(value)[:40]!r}, not a {kind}")
    offload = record.get("offload")
    for path, needed in (
        ("phases", ("name", "reuse", "first_step", "last_step")),
        ("switches", ("step", "reason")),
        ("trace", ("seen",)),
        ("offload.phases", ("name", "seconds")),
        ("offload.plans", ("inputs", "part", "runs")),
    ):
        part, key = (offload if "." in path else record), path.rpartition(".")[2]
        rows = part.get(key) if isinstance(part, dict) else None
        for i, row in enumerate(rows if isinstance(rows, list) else ()):
            missing = [n for n in needed if not isinstance(row, dict) or row.get(n) is None]
            if missing:
                found.append(f"{path}[{i}] lacks {' and '.join(missing)}")
    return found
