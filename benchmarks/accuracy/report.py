"""Finished runs -> table (markdown), plot (PNG) and everything (JSON), all dated."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from provenance import provenance

from accuracy.recipes import Comparison, Run, Task
from accuracy.train import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes  # slow to import, wanted once, at the end


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration over its seeds; accuracies in percent."""

    number: int
    name: str
    against: str | None
    fresh: float
    decodes: float
    epochs: float
    last: tuple[float, ...]
    """Test accuracy of the last weights, seed by seed."""
    ema: tuple[float, ...]
    """Test accuracy of the averaged weights."""
    reported: str
    """`last` or `ema`: which of the two the configuration stands for."""
    selection: float
    cpu_seconds: float

    def tests(self, kind: str | None = None) -> tuple[float, ...]:
        return self.ema if (kind or self.reported) == "ema" else self.last

    @property
    def mean(self) -> float:
        return statistics.fmean(self.tests())

    @property
    def sd(self) -> float | None:
        return _sd(self.tests())

    def minus(self, other: "Row") -> tuple[float, float | None]:
        """Difference and its standard error, the same kind of weights on both sides."""
        mine, others = self.tests(), other.tests(self.reported)
        difference = statistics.fmean(mine) - statistics.fmean(others)
        spreads = [(_sd(values), len(values)) for values in (mine, others)]
        variances = [sd**2 / count for sd, count in spreads if sd is not None]
        return difference, sum(variances) ** 0.5 if len(variances) == 2 else None


def _sd(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


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
                last=tuple(100 * record["test_last"] for record in mine),
                ema=tuple(100 * record["test_ema"] for record in mine),
                reported=mine[0]["reported"], selection=100 * mean("selection"),
                cpu_seconds=mean("cpu_seconds"),
            )
        )  # fmt: skip
    return rows


def write_report(
    stem: Path,
    task: Task,
    runs: Sequence[Run],
    records: Sequence[Record],
    comparisons: Sequence[Comparison] = (),
) -> None:
    """`stem`.md, .json, .png."""
    rows = summarise(runs, records)
    if not rows:
        return
    seeds = sorted({record["seed"] for record in records})
    about = provenance()
    stem.parent.mkdir(parents=True, exist_ok=True)
    text = [
        f"# {stem.name.replace('_', ' ')}\n",
        f"Task: {task}.\n",
        f"Machine: {', '.join(f'{key} {value}' for key, value in about.items())}. Seeds {seeds}.\n",
        *_compared(rows, comparisons),
        _table(rows),
        *_notes(rows),
        *_switches(records),
    ]
    stem.with_suffix(".md").write_text("\n".join(text) + "\n")
    _write_json(stem.with_suffix(".json"), task, runs, [_compact(r) for r in records], about)
    _plot(stem.with_suffix(".png"), rows, task.epochs)


def _compact(record: Record) -> Record:
    """A record with its curves as columns of rounded numbers: small enough to keep in git."""

    def column(key: str, digits: int) -> list[float | None]:
        values = [row[key] for row in record["history"]]
        return [None if value is None else round(value, digits) for value in values]

    curves = {"at": 3, "holdout": 4, "first_serve_loss": 4, "lr": 5, "decodes": 0}
    history = {key: column(key, digits) for key, digits in curves.items()}
    verdicts = [row["verdict"] for row in record["history"] if row["verdict"]]
    return {**record, "history": history, "verdicts": verdicts}


def _write_json(
    path: Path,
    task: Task,
    runs: Sequence[Run],
    results: Sequence[Record],
    about: dict[str, Any],
) -> None:
    """One line a run and one line a result, so that a diff says what changed."""
    shown = [asdict(run) for run in runs]
    lines = [
        f'{{"task": {json.dumps(asdict(task))},',
        f'"machine": {json.dumps(about)},',
        '"runs": [',
        ",\n".join(json.dumps(run) for run in shown),
        '],\n"results": [',
        ",\n".join(json.dumps(result) for result in results),
        "]}",
    ]
    path.write_text("\n".join(lines) + "\n")


def _table(rows: Sequence[Row]) -> str:
    by_name = {row.name: row for row in rows}
    lines = [
        "| # | configuration | fresh passes | fewer decodes | decodes | n | test % | sd | min | max"
        " | selection % | last / EMA test % | against | difference | CPU s |",
        "|" + "---|" * 15,
    ]
    for row in rows:
        other = by_name.get(row.against or "")
        saved = 1 - row.decodes / other.decodes if other else 0.0
        difference = f"{row.minus(other)[0]:+.2f}" if other else ""
        tests = row.tests()
        sd = "" if row.sd is None else f"{row.sd:.2f}"
        lines.append(
            f"| {row.number} | {row.name} | {row.fresh:.1f} | {100 * saved:.0f} % |"
            f" {row.decodes:.0f} | {len(tests)} | **{row.mean:.2f}** | {sd} |"
            f" {min(tests):.2f} | {max(tests):.2f} | {row.selection:.2f} |"
            f" {statistics.fmean(row.last):.2f} / {statistics.fmean(row.ema):.2f} |"
            f" {'#' + str(other.number) if other else ''} | {difference} | {row.cpu_seconds:.0f} |"
        )
    return "\n".join(lines) + "\n"


def _compared(rows: Sequence[Row], comparisons: Sequence[Comparison]) -> list[str]:
    """Differences of means with their standard errors, once there are two seeds of each."""
    by_name = {row.name: row for row in rows}
    lines = ["| what | row | against | points | standard error |", "|---|---|---|---|---|"]
    for entry in comparisons:
        row, other = by_name.get(entry.row), by_name.get(entry.other)
        if row is None or other is None:
            continue
        difference, error = row.minus(other)
        shown = "" if error is None else f"{error:.2f}"
        lines.append(
            f"| {entry.says} | #{row.number} {row.name} | #{other.number} {other.name} |"
            f" **{difference:+.2f}** | {shown} |"
        )
    return ["\n".join(lines) + "\n"] if len(lines) > 2 else []


def _notes(rows: Sequence[Row]) -> list[str]:
    spread = [row.sd for row in rows if row.sd is not None]
    notes = [
        "Every configuration that was run is in the table. 'test %' is the reported number: last"
        " weights, or their average where the name says ema; both are shown, and a difference"
        " has the same kind on both sides. The test set was read once a run, at its end; a choice"
        " between variants is to be made on 'selection %': pictures of the training set that no run"
        " trains on. The rows were designed after an earlier study whose choices had seen the test"
        " set.",
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


def _plot(path: Path, rows: Sequence[Row], epochs: float) -> None:
    """Accuracy against fresh passes; runs much longer than the task's have a panel of their own."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    longer = [row for row in rows if row.epochs > 1.5 * epochs]
    panels = [panel for panel in ([row for row in rows if row not in longer], longer) if panel]
    figure, axes = plt.subplots(len(panels), figsize=(12, 7.5 * len(panels)), squeeze=False)
    for place, panel in zip(axes[:, 0], panels, strict=True):
        _draw(place, panel)
    axes[0, 0].set_title("Accuracy against decoding: blue reuses, red does not; bars: sd of seeds")
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


def _draw(axes: "Axes", rows: Sequence[Row]) -> None:
    """Points carry their row's number; the legend beside the panel has the names."""
    axes.axhline(rows[0].mean, color="0.6", linewidth=1, linestyle="--", zorder=1)
    for row in rows:
        axes.errorbar(
            row.fresh, row.mean, row.sd or 0.0, fmt="o", color=_color(row), capsize=3,
            markersize=5, elinewidth=0.8, label=f"{row.number}  {row.name}: {row.mean:.2f}",
        )  # fmt: skip
    for row, x, y in _label_places(rows):
        axes.annotate(
            str(row.number), (row.fresh, row.mean), xytext=(x, y), fontsize=8, va="center",
            color=_color(row), arrowprops={"arrowstyle": "-", "color": "0.7", "lw": 0.5},
        )  # fmt: skip
    axes.set_xlabel("fresh passes (decodes / training pictures)")
    axes.set_ylabel(f"test accuracy, % (dashed: row {rows[0].number})")
    axes.grid(alpha=0.3)
    axes.legend(
        loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=7, frameon=False, handlelength=1
    )


def _color(row: Row) -> str:
    return "tab:blue" if row.epochs > 1.02 * row.fresh else "tab:red"


def _label_places(rows: Sequence[Row]) -> list[tuple[Row, float, float]]:
    """Beside the points; where points stand in one column, labels keep their order and a gap."""
    span = max(row.fresh for row in rows) - min(row.fresh for row in rows) or 1.0
    gap = 0.025 * ((max(row.mean for row in rows) - min(row.mean for row in rows)) or 1.0)
    places: list[tuple[Row, float, float]] = []
    column: list[Row] = []
    by_fresh = sorted(rows, key=lambda row: row.fresh)
    for row, following in zip(by_fresh, [*by_fresh[1:], None], strict=True):
        column.append(row)
        if following is not None and following.fresh - row.fresh < 0.03 * span:
            continue
        column.sort(key=lambda row: row.mean)
        heights = [row.mean for row in column]
        for index in range(1, len(heights)):
            heights[index] = max(heights[index], heights[index - 1] + gap)
        right = max(row.fresh for row in column) + 0.02 * span
        places += [(row, right, y) for row, y in zip(column, heights, strict=True)]
        column = []
    return places
