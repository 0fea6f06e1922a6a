"""Finished runs -> table (markdown), plot (PNG) and everything (JSON), all dated."""

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from accuracy.recipes import Run, Task
from accuracy.train import Record


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration over its seeds; accuracies in percent."""

    number: int
    name: str
    against: str | None
    fresh: float
    decodes: float
    epochs: float
    tests: tuple[float, ...]
    holdout: float
    test_last: float
    test_ema: float
    reported: str
    cpu_seconds: float

    @property
    def mean(self) -> float:
        return statistics.fmean(self.tests)

    @property
    def sd(self) -> float | None:
        return statistics.stdev(self.tests) if len(self.tests) > 1 else None


def summarise(runs: Sequence[Run], records: Sequence[Record]) -> list[Row]:
    """A row for every run that finished at least once, in the preset's order."""
    rows: list[Row] = []
    for number, run in enumerate(runs, start=1):
        mine = [record for record in records if record["name"] == run.name]
        if not mine:
            continue

        def mean(key: str, of: Sequence[Record] = tuple(mine)) -> float:
            return statistics.fmean(record[key] for record in of)

        rows.append(
            Row(
                number, run.name, run.against, mean("fresh"), mean("decodes"), mean("epochs"),
                tuple(100 * record["test"] for record in mine), 100 * mean("holdout"),
                100 * mean("test_last"), 100 * mean("test_ema"), mine[0]["reported"],
                mean("cpu_seconds"),
            )
        )  # fmt: skip
    return rows


def machine() -> dict[str, str | int]:
    model = platform.processor()
    cpus = Path("/proc/cpuinfo")
    if cpus.exists():
        named = [line for line in cpus.read_text().splitlines() if line.startswith("model name")]
        model = named[0].split(":", 1)[1].strip() if named else model
    about: dict[str, str | int] = {
        "cpu": model, "cores": os.cpu_count() or 0, "threads used": torch.get_num_threads(),
        "torch": torch.__version__, "python": platform.python_version(),
    }  # fmt: skip
    if torch.cuda.is_available():
        about["gpu"] = torch.cuda.get_device_name()
    return about


def write_report(
    stem: Path, task: Task, runs: Sequence[Run], records: Sequence[Record], *, expected: int
) -> None:
    """`stem`.md, .json, .png; `expected` is how many seeds were asked for."""
    rows = summarise(runs, records)
    if not rows:
        return
    seeds = sorted({record["seed"] for record in records})
    about = machine()
    stem.parent.mkdir(parents=True, exist_ok=True)
    text = [
        f"# {stem.name.replace('_', ' ')}\n",
        f"Task: {task}.\n",
        f"Machine: {', '.join(f'{key} {value}' for key, value in about.items())}."
        f" Seeds {seeds}, {expected} asked for.\n",
        _table(rows),
        *_notes(rows),
        *_switches(records),
    ]
    stem.with_suffix(".md").write_text("\n".join(text) + "\n")
    everything = {
        "task": asdict(task), "machine": about, "seeds": seeds,
        "runs": [{"name": run.name, "against": run.against, "order": run.order,
                  "buffer_batches": run.buffer_batches,
                  "phases": [asdict(phase) for phase in run.phases],
                  "plateau": asdict(run.plateau) if run.plateau else None} for run in runs],
        "results": list(records),
    }  # fmt: skip
    stem.with_suffix(".json").write_text(json.dumps(everything, indent=1) + "\n")
    _plot(stem.with_suffix(".png"), rows)


def _table(rows: Sequence[Row]) -> str:
    by_name = {row.name: row for row in rows}
    lines = [
        "| # | configuration | fresh passes | fewer decodes | decodes | n | test % | sd | min | max"
        " | hold-out % | last / EMA test % | against | difference | CPU s |",
        "|" + "---|" * 15,
    ]
    for row in rows:
        other = by_name.get(row.against or "")
        saved = 1 - row.decodes / other.decodes if other else 0.0
        difference = f"{row.mean - other.mean:+.2f}" if other else ""
        sd = "" if row.sd is None else f"{row.sd:.2f}"
        lines.append(
            f"| {row.number} | {row.name} | {row.fresh:.1f} | {100 * saved:.0f} % |"
            f" {row.decodes:.0f} | {len(row.tests)} | **{row.mean:.2f}** | {sd} |"
            f" {min(row.tests):.2f} | {max(row.tests):.2f} | {row.holdout:.2f} |"
            f" {row.test_last:.2f} / {row.test_ema:.2f} |"
            f" {'#' + str(other.number) if other else ''} | {difference} | {row.cpu_seconds:.0f} |"
        )
    return "\n".join(lines) + "\n"


def _notes(rows: Sequence[Row]) -> list[str]:
    spread = [row.sd for row in rows if row.sd is not None]
    notes = [
        "Every configuration that was run is in the table. 'test %' is the reported number: last"
        " weights, or their average where the name says ema; both are shown. The test set was read"
        " once a run, at its end; a choice between variants is to be made on 'hold-out %'"
        " (pictures of the training set that no run trains on). Rows were designed after an earlier"
        " study whose choices had seen the test set.",
        "Decodes are first serves that happened; 'fewer decodes' and 'difference' are against the"
        " row named in 'against'.",
    ]
    if spread:
        pooled = statistics.fmean(value**2 for value in spread) ** 0.5
        notes.append(f"Pooled seed sd: {pooled:.2f} points.")
    return [note + "\n" for note in notes]


def _switches(records: Sequence[Record]) -> list[str]:
    """Where runs with a plateau rule switched, and why."""
    lines = [
        f"- {record['name']}, seed {record['seed']}: epoch {switch['at']:.1f}, {switch['reason']}"
        f" ({switch['detail']})"
        for record in records
        for switch in record["switches"]
        if switch["reason"] != "planned"
    ]
    return ["Switches:\n", *lines] if lines else []


def _plot(path: Path, rows: Sequence[Row]) -> None:
    """Accuracy against fresh passes. Points carry their row's number; the legend has the names."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    reused = {row.name for row in rows if row.epochs > 1.02 * row.fresh}
    figure, axes = plt.subplots(figsize=(13, 7.5))
    base = rows[0]
    axes.axhline(base.mean, color="0.6", linewidth=1, linestyle="--", zorder=1)
    span = max(row.fresh for row in rows) - min(row.fresh for row in rows) or 1.0
    low, high = min(row.mean for row in rows), max(row.mean for row in rows)
    taken: list[tuple[float, float]] = []
    for row in rows:
        color = "tab:blue" if row.name in reused else "tab:red"
        axes.errorbar(row.fresh, row.mean, row.sd or 0.0, fmt="o", color=color, capsize=3,
                      markersize=5, elinewidth=0.8,
                      label=f"{row.number}  {row.name}: {row.mean:.2f}")  # fmt: skip
        x, y = row.fresh, row.mean
        # A label that would sit on another one moves right.
        while any(abs(x - a) < 0.02 * span and abs(y - b) < 0.03 * (high - low) for a, b in taken):
            x += 0.02 * span
        taken.append((x, y))
        axes.annotate(str(row.number), (x, y), xytext=(5, 3), textcoords="offset points",
                      fontsize=8, color=color)  # fmt: skip
    axes.set_xlabel("fresh passes (decodes / training pictures)")
    axes.set_ylabel("test accuracy, %")
    axes.set_title("Accuracy against decoding: blue reuses, red does not; dashed: row 1; bars: sd")
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=7, frameon=False,
                handlelength=1)  # fmt: skip
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)
