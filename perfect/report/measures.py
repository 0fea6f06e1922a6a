"""Compares runs: their figures, the differences of their configurations, remarks for the reader.

                      fresh     reuse       labels(runs)
    Accuracy         98.80 %   97.40 %      measures(first): Run -> number -> text
    Speed-up          1.00x     2.02x       cells(runs): the texts, and which is the best

The other runs are measured against the first. An unfinished run is shown and marked; it has no
speed-up and cannot be the best.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from perfect.report.results import Run
from perfect.report.words import DASH, count, duration, passes, percent, size, times

OFFLOADED = ("Transfer stall", "Step memory", "Memory budget")
"""These measures are shown if a run has them."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One line of the comparison."""

    name: str
    value: Callable[[Run], float | None]
    text: Callable[[float | None], str]
    best: Literal["max", "min"] | None = None


def measures(first: Run) -> tuple[Measure, ...]:
    """Return all measures that are compared. The speed-up is against `first`."""
    return (
        Measure("Accuracy", lambda run: run.number("accuracy"), lambda x: percent(x, 2), "max"),
        Measure("Wall time", lambda run: run.number("wall_seconds"), duration, "min"),
        Measure("Speed-up", lambda run: speed_up(run, first), times, "max"),
        Measure("Decodes", lambda run: run.decodes, count, "min"),
        Measure("Decodes saved", lambda run: run.saved, percent, "max"),
        Measure("Fresh passes", lambda run: run.fresh_passes, passes, "min"),
        Measure("Served", lambda run: run.number("served_samples"), count),
        Measure("Stall", lambda run: run.number("stall_seconds"), duration, "min"),
        Measure("Stall share", lambda run: run.stall_share, percent, "min"),
        Measure("Transfer stall", lambda run: run.transfer_share, percent, "min"),
        Measure("Step memory", lambda run: run.table("offload").get("peak_bytes"), size, "min"),
        Measure("Memory budget", lambda run: run.table("offload").get("budget_bytes"), size),
        Measure("Steps", lambda run: run.number("steps"), count),
        Measure("Peak lr", peak_lr, lambda x: DASH if x is None else f"{x:.3g}"),
    )


def speed_up(run: Run, first: Run) -> float | None:
    """Return how many times faster than the first run; None unless both are finished."""
    seconds, reference = run.number("wall_seconds"), first.number("wall_seconds")
    done = run.completed and first.completed
    return reference / seconds if done and seconds and reference else None


def peak_lr(run: Run) -> float | None:
    seen = [*run.metrics.pairs("lr", "lr")[0]]
    seen += [p[key] for p in run.rows("phases") for key in ("lr_start", "lr_end") if p.get(key)]
    return float(max(seen)) if seen else None


def cells(runs: Sequence[Run]) -> list[tuple[str, list[tuple[str, bool]]]]:
    """Return for each measure its name, and for each run the text and whether it is the best."""
    offloaded = any(run.table("offload") for run in runs)
    told = [m for m in measures(runs[0]) if offloaded or m.name not in OFFLOADED]
    return [(m.name, _cells(m, runs)) for m in told]


def kept(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the same figures as numbers, and what each run ran on: for a program to read."""
    return [
        {
            "run": label, "folder": str(run.folder), "status": run.status,
            "seed": run.record.get("seed"), "accuracy_on": run.record.get("accuracy_on"),
            **{measure.name: measure.value(run) for measure in measures(runs[0])},
            "environment": run.table("environment"), "config": run.table("config"),
        }
        for run, label in zip(runs, labels(runs), strict=True)
    ]  # fmt: skip


def _cells(measure: Measure, runs: Sequence[Run]) -> list[tuple[str, bool]]:
    values = [measure.value(run) for run in runs]
    texts = [measure.text(value) for value in values]
    finished = [
        value
        for value, run in zip(values, runs, strict=True)
        if value is not None and run.completed
    ]
    # If all texts are the same, none is the best.
    if measure.best is None or len(finished) < 2 or len(set(texts)) == 1:
        return [(text, False) for text in texts]
    best = measure.text({"max": max, "min": min}[measure.best](finished))
    return [(text, text == best and run.completed) for text, run in zip(texts, runs, strict=True)]


def labels(runs: Sequence[Run]) -> list[str]:
    """Return the runs' names, or their folders if two names are equal. Mark unfinished runs."""
    names = [run.name for run in runs]
    if max(Counter(names).values()) > 1:
        parent = common_parent([run.folder for run in runs])
        names = [os.path.relpath(run.folder.resolve(), parent) for run in runs]
    return [
        name if run.completed else f"{name} ({run.status})"
        for name, run in zip(names, runs, strict=True)
    ]


def remarks(runs: Sequence[Run]) -> list[str]:
    """Return what a reader must know before believing the table."""
    said = []
    open_runs = [
        label for label, r in zip(labels(runs), runs, strict=True) if r.status == "running"
    ]
    if open_runs:
        said.append(f"These are still running, with figures so far: {', '.join(open_runs)}.")
    steps = [run.number("steps") or 0 for run in runs if run.completed]
    if steps and max(steps) > 1.01 * min(steps):
        said.append(
            "The runs took different numbers of steps: those with fewer are also faster for that."
        )
    if len({run.record.get("accuracy_on") for run in runs if run.number("accuracy")}) > 1:
        said.append("Some accuracies are of the test set, others of the hold-out set.")
    return said + _same_losses(runs)


def _same_losses(runs: Sequence[Run]) -> list[str]:
    """Say whether runs that differ in nothing but `offload` had the same losses."""
    said = []
    named = list(zip(runs, labels(runs), strict=True))
    for number, (run, name) in enumerate(named):
        for other, before in named[:number]:
            differ = differences([run.table("config"), other.table("config")])
            alike = {key.partition(".")[0] for key, _ in differ} == {"offload"}
            if not (alike and run.completed and other.completed):
                continue
            count, step = compared_losses(run, other)
            if step is not None:
                said.append(f"The losses of {before} and {name} differ from step {step:.0f} on.")
            elif count:
                said.append(f"All {count} losses of {before} and {name} are equal, bit for bit.")
    return said


def compared_losses(run: Run, other: Run) -> tuple[int, float | None]:
    """Return how many losses both have logged, and the first step at which these differ."""
    count, steps = 0, []
    for name in ("train_loss", "val_loss", "test_loss"):
        rows, others = (
            [*zip(*one.metrics.pairs("step", name), strict=True)] for one in (run, other)
        )
        count += min(len(rows), len(others))
        steps += [min(a or b, b or a) for a, b in zip_longest(rows, others) if a != b]
    return count, min(steps)[0] if steps else None


def differences(configs: Sequence[Mapping[str, object]]) -> list[tuple[str, list[str]]]:
    """Return the keys whose values differ, with the value in every config."""
    flat = [_flat(config) for config in configs]
    keys = dict.fromkeys(key for config in flat for key in config)
    rows = [(key, [config.get(key, DASH) for config in flat]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _flat(value: object, at: str = "") -> dict[str, str]:
    if isinstance(value, Mapping) and value:
        parts = [(f"{at}.{key}" if at else str(key), part) for key, part in value.items()]
    elif isinstance(value, list) and any(isinstance(part, Mapping | list) for part in value):
        parts = [(f"{at}[{i}]", part) for i, part in enumerate(value)]
    else:
        return {at: value if isinstance(value, str) else json.dumps(value, default=str)}
    return {key: text for name, part in parts for key, text in _flat(part, name).items()}


def common_parent(folders: Sequence[Path]) -> Path:
    return Path(os.path.commonpath([folder.resolve().parent for folder in folders]))
