"""Compares runs: their figures, the differences of their configurations, remarks for the reader."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import yaml

from perfect.errors import RunError
from perfect.report import words
from perfect.report.results import Run
from perfect.report.words import DASH, accuracy, count, passes, percent, seconds, size, times

OPTIONAL = ("Transfer stall", "Step memory", "Memory budget", "Process memory", "GPU memory")
"""These measures are shown if a run has them."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One line of the comparison."""

    name: str
    value: Callable[[Run], float | None]
    text: Callable[[float | None], str]
    best: Literal["max", "min"] | None = None


def measures(baseline: Run) -> tuple[Measure, ...]:
    """Return all measures that are compared. The speed-up is against the baseline."""
    return (
        Measure("Accuracy", lambda run: run.number("accuracy"), accuracy, "max"),
        Measure("Wall time", lambda run: run.number("wall_seconds"), seconds, "min"),
        Measure("Speed-up", lambda run: speed_up(run, baseline), times, "max"),
        Measure("Decodes", lambda run: run.decodes, count, "min"),
        Measure("Decodes saved", lambda run: run.saved, percent, "max"),
        Measure("Fresh passes", lambda run: run.fresh_passes, passes, "min"),
        Measure("Served", lambda run: run.number("served_samples"), count),
        Measure("Stall", lambda run: run.number("stall_seconds"), seconds, "min"),
        Measure("Stall share", lambda run: run.stall_share, percent, "min"),
        Measure("Transfer stall", lambda run: run.transfer_share, percent, "min"),
        Measure("Step memory", lambda run: run.table("offload").get("peak_bytes"), size, "min"),
        Measure("Memory budget", lambda run: run.table("offload").get("budget_bytes"), size),
        Measure("Process memory", lambda run: run.number("process_peak_bytes"), size, "min"),
        Measure("GPU memory", lambda run: run.number("allocated_peak_bytes"), size, "min"),
        Measure("Steps", lambda run: run.number("steps"), count),
        Measure("Peak lr", peak_lr, lambda x: DASH if x is None else f"{x:.3g}"),
    )


def baseline_of(runs: Sequence[Run], named: str | None) -> Run:
    """Return the run of this name or folder, or else the first one without reuse."""
    if named is None:
        return next((run for run in runs if without_reuse(run)), runs[0])
    for run in runs:
        if named == run.name or Path(named).resolve() == run.folder.resolve():
            return run
    names = ", ".join(run.name for run in runs)
    raise RunError(f"is none of the runs; give one of {names}")


def without_reuse(run: Run) -> bool:
    phases = run.table("config").get("phases") or run.rows("phases")
    return bool(phases) and all(phase.get("reuse", 1) == 1 for phase in phases)


def speed_up(run: Run, baseline: Run) -> float | None:
    """Return how many times faster than the baseline; None unless both are finished."""
    took, reference = run.number("wall_seconds"), baseline.number("wall_seconds")
    done = run.completed and baseline.completed
    return reference / took if done and took and reference else None


def peak_lr(run: Run) -> float | None:
    seen = [*run.metrics.pairs("lr", "lr")[0]]
    seen += [p[key] for p in run.rows("phases") for key in ("lr_start", "lr_end") if p.get(key)]
    return float(max(seen)) if seen else None


def cells(runs: Sequence[Run], baseline: Run) -> list[tuple[str, list[tuple[str, bool]]]]:
    """Return for each measure its name, and for each run the text and whether it is the best."""
    return [
        (m.name, _cells(m, runs))
        for m in measures(baseline)
        if m.name not in OPTIONAL or any(m.value(run) is not None for run in runs)
    ]


def figures_as_numbers(runs: Sequence[Run], baseline: Run) -> list[dict[str, Any]]:
    """Return the same figures as numbers, and what each run ran on: for a program to read."""
    return [
        {
            "run": label, "folder": str(run.folder), "status": run.status,
            "baseline": run is baseline,
            "seed": run.record.get("seed"), "accuracy_on": run.record.get("accuracy_on"),
            **{measure.name: measure.value(run) for measure in measures(baseline)},
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
        names = [words.legible(os.path.relpath(run.folder.resolve(), parent)) for run in runs]
    return [
        name if run.completed else f"{name} ({run.status})"
        for name, run in zip(names, runs, strict=True)
    ]


def remarks(runs: Sequence[Run], baseline: Run) -> list[str]:
    """Return what a reader must know before believing the table."""
    [name] = [name for run, name in zip(runs, labels(runs), strict=True) if run is baseline]
    kind = ", which is without reuse" if without_reuse(baseline) else ""
    notes = [f"Speed-ups are in wall time, against {name}{kind}."]
    if any(run.number("process_peak_bytes") for run in runs):
        notes.append("Process memory is the most that was resident: Python and libraries included.")
    open_runs = [
        label for label, r in zip(labels(runs), runs, strict=True) if r.status == "running"
    ]
    if open_runs:
        notes.append(f"These are still running, with figures so far: {', '.join(open_runs)}.")
    steps = [run.number("steps") or 0 for run in runs if run.completed]
    if steps and max(steps) > 1.01 * min(steps):
        notes.append(
            "The runs took different numbers of steps: fewer steps alone make a run faster."
        )
    if len({run.record.get("accuracy_on") for run in runs if run.number("accuracy")}) > 1:
        notes.append("Some accuracies are of the test set, others of the hold-out set.")
    return notes + _same_losses(runs)


def _same_losses(runs: Sequence[Run]) -> list[str]:
    """Say whether runs that differ in nothing but `offload` had the same losses."""
    notes = []
    named = list(zip(runs, labels(runs), strict=True))
    for number, (run, name) in enumerate(named):
        for other, before in named[:number]:
            differ = differences([run, other])
            alike = {key.partition(".")[0] for key, _ in differ} == {"offload"}
            if not (alike and run.completed and other.completed):
                continue
            count, step = compared_losses(run, other)
            if step is not None:
                notes.append(f"The losses of {before} and {name} differ from step {step:.0f} on.")
            elif count:
                notes.append(f"All {count} losses of {before} and {name} are equal, bit for bit.")
    return notes


def compared_losses(run: Run, other: Run) -> tuple[int, float | None]:
    """Return how many losses both have logged, and the first step at which these differ."""
    count, steps = 0, []
    for name in ("train_loss", "val_loss", "test_loss"):
        rows, others = (
            [*zip(*each.metrics.pairs("step", name), strict=True)] for each in (run, other)
        )
        count += min(len(rows), len(others))
        steps += [min(a or b, b or a) for a, b in zip_longest(rows, others) if a != b]
    return count, min(steps)[0] if steps else None


ABSENT: Any = object()
Setting = tuple[Any, Any]
"""A value of a configuration, and of it what differs from the defaults."""


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return the settings that differ, with the value in every run. A section that only some runs
    have is one setting, without its defaults."""
    settings = [(run.table("config"), run.table("chosen") or run.table("config")) for run in runs]
    return list(_differences(settings, ""))


def _differences(settings: Sequence[Setting], at: str) -> Iterator[tuple[str, list[str]]]:
    values = [value for value, _ in settings]
    if all(isinstance(value, Mapping) for value in values):
        keys = dict.fromkeys(key for value in values for key in value)
        parts = [(f"{at}.{key}" if at else str(key), key) for key in keys]
    elif all(isinstance(v, list) and any(isinstance(p, Mapping | list) for p in v) for v in values):
        parts = [(f"{at}[{i}]", i) for i in range(max(map(len, values)))]
    else:
        some = any(isinstance(value, Mapping) for value in values)
        texts = [DASH if some and value is None else _text(value, given)
                 for value, given in settings]  # fmt: skip
        if len(set(texts)) > 1:
            yield at, texts
        return
    for name, key in parts:
        yield from _differences([(_part(v, key), _part(given, key)) for v, given in settings], name)


def _part(whole: Any, key: Any) -> Any:
    try:
        return whole[key]
    except (KeyError, IndexError, TypeError):
        return ABSENT


def _text(value: object, given: object) -> str:
    if value is ABSENT:
        return DASH
    if isinstance(value, Mapping):
        shown = {} if given is ABSENT else given
        return yaml.safe_dump(shown, default_flow_style=True, sort_keys=False, width=1000).strip()
    return value if isinstance(value, str) else json.dumps(value, default=str)


def common_parent(folders: Sequence[Path]) -> Path:
    return Path(os.path.commonpath([folder.resolve().parent for folder in folders]))
