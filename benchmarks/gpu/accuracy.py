"""Part h: does training on reused samples cost accuracy? The presets of perfect_accuracy.py.

    cell = preset; seed; run      seeds are the outer loop: a table is whole after each of them
    S1  60 epochs of ResNet-18, 3 seeds   S2  the thesis's 200 epochs   S3  a quick net, 12 seeds

What is asked is judged on S1: error and points lost both on the averaged weights (EMA), the points
against the row with the same learning rate at every step and no reuse.
A process keeps one compiled net for all runs of a preset. A run that was cut short goes on at its
last checkpoint. Rows are `accuracy.train`'s records, and compared as `accuracy.report` compares.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from accuracy.bench import Bench
from accuracy.data import Pictures, cifar_pictures, synthetic_pictures
from accuracy.gpu import GpuPreset, gpu_presets
from accuracy.recipes import Task
from accuracy.report import Row, summarise
from accuracy.train import Watch, train
from offloading.report import Asked, Report, table

from gpu.part import Found, Job, Outcome, Rows, Step
from gpu.picture import Panel

NAME = "accuracy"
CLAIM = "Claim: reusing decoded samples, then fresh ones, costs no accuracy and 55 % fewer decodes"
LEAST_TEST, LEAST_SAVED, MOST_LOST = 95.5, 55.0, 0.15
"""Percent, percent of the baseline's decodes, points below the baseline."""
SMOKE = ("no reuse 60, wsd, late decay", "best: wsd 17x3+9 roll12 re")


def presets(smoke: bool) -> dict[str, GpuPreset]:
    found = gpu_presets(tiny=smoke)
    if not smoke:
        return found
    task, runs, _ = found["S1"]
    return {"S1": (task, [run for run in runs if run.name in SMOKE], 1)}


def steps(smoke: bool) -> Sequence[Step]:
    return [
        Step("gpu.accuracy:runs", _cells(name, preset), {"preset": name}, minutes=1.5)
        for name, preset in presets(smoke).items()
    ]


def _cells(name: str, preset: GpuPreset) -> tuple[str, ...]:
    _, runs, seeds = preset
    return tuple(f"{name}; {seed}; {run.name}" for seed in range(seeds) for run in runs)


def runs(job: Job) -> Rows:
    name = str(job.arguments["preset"])
    task, known, _ = presets(job.smoke)[name]
    by_name = {run.name: run for run in known}
    torch.set_float32_matmul_precision("high")
    bench = Bench(task, _pictures(task, job), torch.device(job.device))
    work = Path(job.work)
    work.mkdir(parents=True, exist_ok=True)
    checkpoint = work / f"{name}.ckpt"
    for cell in job.cells:
        _, seed, wanted = cell.split("; ", 2)
        yield cell, train(bench, by_name[wanted], int(seed), Watch(checkpoint, math.inf))
        checkpoint.unlink(missing_ok=True)


def _pictures(task: Task, job: Job) -> Pictures:
    device = torch.device(job.device)
    if job.smoke:
        return synthetic_pictures(task, device)
    if not job.data:
        raise SystemExit("--data DIR: part h needs the folder that holds cifar-10-batches-py")
    return cifar_pictures(Path(job.data), task, device)


def report(found: Found) -> Outcome:
    said = Report(NAME, CLAIM, {"data": "drawn" if found.smoke else "CIFAR-10"})
    panels: list[Panel] = []
    for name, preset in presets(found.smoke).items():
        task, known, seeds = preset
        records = [found.rows[cell] for cell in _cells(name, preset) if cell in found.rows]
        rows = summarise(known, records)
        if not rows:
            continue
        said.tables[f"{name}: {task.net}, {task.epochs:g} epochs, batch {task.batch_size}"] = (
            _table(rows)
        )
        panels.append(Panel(f"{name}: test", "%", {row.name: row.mean for row in rows}))
        if name == "S1":
            said.asked = asked(rows)
            said.remarks = _remarks(rows, seeds)
    said.remarks.append(
        "Differences are to the row's control, with the standard error of the difference; test is"
        " read once, at a run's end; what is asked is judged on the row of the best hold-out."
    )
    return Outcome(said, panels)


def _table(rows: Sequence[Row]) -> str:
    by_name = {row.name: row for row in rows}
    lines: list[list[str]] = []
    for row in rows:
        control = by_name.get(row.against or "")
        lines.append([
            row.name, f"{row.fresh:.1f}", f"{100 * (1 - row.fresh / rows[0].fresh):.0f} %",
            _spread(row.mean, row.sd), row.reported, str(len(row.tests())),
            "" if control is None else f"{_spread(*row.minus(control), sign=True)} to"
            f" {control.name}",
        ])  # fmt: skip
    head = ["run", "fresh passes", "fewer decodes", "test %", "weights", "seeds", "difference"]
    return table(head, lines)


def _spread(value: float, error: float | None, sign: bool = False) -> str:
    said = f"{value:+.2f}" if sign else f"{value:.2f}"
    return said if error is None else f"{said} ± {error:.2f}"


def best(rows: Sequence[Row]) -> tuple[Row, Row] | None:
    """(its control, the row with reuse that saves enough and did best on the hold-out)."""
    by_name = {row.name: row for row in rows}
    reusing = [row for row in rows if "no reuse" not in row.name]
    pairs = [(by_name[row.against], row) for row in reusing if row.against in by_name]
    # A pass that a phase cuts short may have begun a few samples more: the number asked judges.
    most = 100 - LEAST_SAVED + 1
    saving = [pair for pair in pairs if _share(pair[1], pair[0]) <= most]
    return max(saving, key=lambda pair: pair[1].selection) if saving else None


def _share(row: Row, base: Row) -> float:
    """Percent of the baseline's decodes."""
    return round(100 * row.decodes / base.decodes, 1)


def asked(rows: Sequence[Row]) -> list[Asked]:
    found = best(rows)
    if found is None:
        return []
    base, ours = found
    gained, _ = ours.minus(base)
    kind = "averaged" if ours.reported == "ema" else "last"
    return [
        Asked(f"error of '{ours.name}', {kind} weights", 100 - LEAST_TEST, 100 - ours.mean, "%"),
        Asked(f"decodes, of those of '{base.name}'", 100 - LEAST_SAVED, _share(ours, base), "%"),
        Asked(f"points below '{base.name}', {kind} weights", MOST_LOST, -gained),
        Asked("3, over the seeds of both", 1.0, 3 / min(len(ours.tests()), len(base.tests()))),
    ]


def _remarks(rows: Sequence[Row], seeds: int) -> list[str]:
    if best(rows) is None:
        return ["No row with reuse that saves 55 % of the decodes is there yet with its control."]
    return [f"S1 is whole with {seeds} seeds; the thesis's own rows and their controls are S2's."]
