"""`python -m perfect.compare RUN_DIR RUN_DIR ...`: finished runs side by side, in one page.

    RUN_DIR, RUN_DIR, ... --read_run--> Run, Run, ... --MEASURES--> the same table twice:
                                             |                      terminal and compare.html
                                             +--> accuracy over steps, decodes, seconds

The first run is what the others are measured against. A run has one colour everywhere. Bad input is
said in one line a folder (`compare: FOLDER: what; what to do`), all of it at once, with exit code 2
and nothing written; a run that is not finished is taken along and marked, and neither is its
speed-up told nor can it be the best.
"""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator
from rich.console import Console
from rich.table import Table
from rich.text import Text

from perfect.plots import BLUE, GREEN, ORANGE, TIMES, Column, draw_line, panels, put_title, to_svg
from perfect.report import (
    DASH,
    Html,
    Run,
    RunError,
    count,
    duration,
    note,
    page,
    passes,
    percent,
    plot,
    read_run,
    section,
    table,
)  # fmt: skip

COLOURS = (BLUE, ORANGE, GREEN, "#CC79A7", "#E69F00", "#56B4E9", "#4d4d4d")
DASHES = ((), (6, 2), (2, 1.5), (7, 2, 1.5, 2))
ABREAST = 5
"""More runs than these are rows instead of columns."""


# ---- what is compared ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measure:
    """One line of the comparison."""

    name: str
    value: Callable[[Run], float | None]
    text: Callable[[float | None], str]
    best: Literal["max", "min"] | None = None


def measures(first: Run) -> tuple[Measure, ...]:
    """Everything that is compared; speed-up is against `first`."""
    return (
        Measure("Accuracy", lambda run: run.number("accuracy"), lambda x: percent(x, 2), "max"),
        Measure("Wall time", lambda run: run.number("wall_seconds"), duration, "min"),
        Measure("Speed-up", lambda run: speed_up(run, first), _times, "max"),
        Measure("Decodes", lambda run: run.decodes, count, "min"),
        Measure("Decodes saved", lambda run: run.saved, percent, "max"),
        Measure("Fresh passes", lambda run: run.fresh_passes, passes, "min"),
        Measure("Served", lambda run: run.number("served_samples"), count),
        Measure("Stall", lambda run: run.number("stall_seconds"), duration, "min"),
        Measure("Stall share", lambda run: run.stall_share, percent, "min"),
        Measure("Steps", lambda run: run.number("steps"), count),
        Measure("Peak lr", peak_lr, lambda x: DASH if x is None else f"{x:.3g}"),
    )


def speed_up(run: Run, first: Run) -> float | None:
    """How many times faster than the first run; None unless both are finished."""
    seconds, reference = run.number("wall_seconds"), first.number("wall_seconds")
    done = _done(run) and _done(first)
    return reference / seconds if done and seconds and reference else None


def _done(run: Run) -> bool:
    return run.status == "completed"


def peak_lr(run: Run) -> float | None:
    seen = [*run.metrics.pairs("lr", "lr")[0]]
    seen += [p[key] for p in run.rows("phases") for key in ("lr_start", "lr_end") if p.get(key)]
    return float(max(seen)) if seen else None


def _times(ratio: float | None) -> str:
    return DASH if ratio is None else f"{ratio:.2f}{TIMES}"


def cells(runs: Sequence[Run]) -> list[tuple[str, list[tuple[str, bool]]]]:
    """Name of the measure, and for every run its text and whether it is the best."""
    return [(m.name, _cells(m, runs)) for m in measures(runs[0])]


def _cells(measure: Measure, runs: Sequence[Run]) -> list[tuple[str, bool]]:
    values = [measure.value(run) for run in runs]
    texts = [measure.text(value) for value in values]
    finished = [
        value for value, run in zip(values, runs, strict=True) if value is not None and _done(run)
    ]
    # No best where all look the same.
    if measure.best is None or len(finished) < 2 or len(set(texts)) == 1:
        return [(text, False) for text in texts]
    best = measure.text({"max": max, "min": min}[measure.best](finished))
    return [(text, text == best and _done(run)) for text, run in zip(texts, runs, strict=True)]


def labels(runs: Sequence[Run]) -> list[str]:
    """The runs' names; their folders where two have the same name. Unfinished ones are marked."""
    names = [run.name for run in runs]
    if max(Counter(names).values()) > 1:
        parent = common_parent([run.folder for run in runs])
        names = [os.path.relpath(run.folder.resolve(), parent) for run in runs]
    return [
        name if _done(run) else f"{name} ({run.status})"
        for name, run in zip(names, runs, strict=True)
    ]


def remarks(runs: Sequence[Run]) -> list[str]:
    """What a reader must know before believing the table."""
    said = []
    open_runs = [
        label for label, r in zip(labels(runs), runs, strict=True) if r.status == "running"
    ]
    if open_runs:
        said.append(f"Still running, figures so far: {', '.join(open_runs)}.")
    steps = [run.number("steps") or 0 for run in runs if _done(run)]
    if steps and max(steps) > 1.01 * min(steps):
        said.append(
            "The runs took different numbers of steps: a shorter run is faster for it, too."
        )
    if len({run.record.get("accuracy_on") for run in runs if run.number("accuracy")}) > 1:
        said.append("Some accuracies are of the test set, others of the hold-out set.")
    return said


def differences(configs: Sequence[Mapping[str, object]]) -> list[tuple[str, list[str]]]:
    """The keys whose values differ, and the value in every config."""
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


# ---- the figure ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Curve:
    """Hold-out accuracy of a run (0 to 1) over something, and where the final weights stand."""

    x: Column
    y: Column
    end: tuple[float, float] | None


AXES = (
    ("optimizer step", "step", "steps"),
    ("samples decoded", "decoded", "decoded_samples"),
    ("seconds", "wall_seconds", "wall_seconds"),
)


def curve(run: Run, column: str, total: str) -> Curve:
    """Accuracy over a column. A row of validation need not have the column: it is read off between
    the rows around it."""
    steps, accuracy = run.metrics.pairs("step", "val_accuracy")
    known, values = run.metrics.pairs("step", column)
    if not len(known):
        steps, accuracy = steps[:0], accuracy[:0]
    # From (0, 0): nothing is decoded before the first step.
    x = np.interp(steps, np.concatenate([[0.0], known]), np.concatenate([[0.0], values]))
    last, final = run.number(total), run.number("accuracy")
    return Curve(x, accuracy, None if last is None or final is None else (last, final))


def accuracy_figure(runs: Sequence[Run]) -> str | None:
    """Panels side by side with one axis of accuracy, and a curve a run in each."""
    drawn = [[curve(run, column, total) for run in runs] for _, column, total in AXES]
    if not any(len(c.x) or c.end for curves in drawn for c in curves):
        return None
    with panels([3.2], columns=len(AXES)) as (figure, axes):
        for panel, curves, (label, _, _) in zip(axes, drawn, AXES, strict=True):
            for number, c in enumerate(curves):
                colour, dashes = line_style(number)
                draw_line(panel, c.x, 100 * c.y, colour, dots=False, dashes=dashes)
                if c.end is not None:
                    end = (c.end[0], 100 * c.end[1])
                    panel.plot(*end, "D", color=colour, ms=6, mec="white", clip_on=False)
            panel.margins(x=0.03)
            panel.set_xlim(left=0)
            panel.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
            panel.xaxis.set_major_formatter(FuncFormatter(_short))
            panel.set_xlabel(label)
        limits = _accuracy_limits([c for curves in drawn for c in curves])
        for i, panel in enumerate(axes):
            panel.set_ylim(*limits)
            panel.tick_params(labelleft=i == 0)
        put_title(axes[0], "Accuracy, %", [])
        return to_svg(figure, "Accuracy of every run over steps, samples decoded and seconds")


def _accuracy_limits(curves: Sequence[Curve]) -> tuple[float, float]:
    """The upper half of the climb: what the runs differ in is decided there."""
    seen = [100 * y for c in curves for y in (*c.y, *(c.end[1:] if c.end else ()))]
    ends = [100 * (c.end[1] if c.end else c.y[-1]) for c in curves if c.end or len(c.y)]
    bottom = (min(seen) + min(ends)) / 2
    margin = 0.06 * (max(seen) - bottom) or 1.0
    return bottom - margin, max(seen) + margin


def line_style(number: int) -> tuple[str, tuple[float, ...]]:
    """Colour and dashes of the run with this number."""
    return COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]


def _short(value: float, _: int) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


# ---- the page and the terminal ------------------------------------------------------------------


def comparison(runs: Sequence[Run]) -> str:
    """The page."""
    names = [_key(i, label) for i, label in enumerate(labels(runs))]
    rows = [
        (name, [Html(f"<b>{escape(text)}</b>") if best else text for text, best in line])
        for name, line in cells(runs)
    ]
    differ = differences([run.table("config") for run in runs])
    key = Html("<p class=key>" + " ".join(f"<span>{name}</span>" for name in names) + "</p>")
    folders = [
        (name, run.folder, run.status, run.record.get("seed", DASH))
        for name, run in zip(names, runs, strict=True)
    ]
    parts = [
        f"<style>{CSS}</style>",
        section(
            "Figures",
            _side_by_side(names, rows),
            note(f"{_TOLD} {' '.join(remarks(runs))}"),
        ),
        section(
            "Accuracy",
            key,
            plot(accuracy_figure(runs), "Lines: hold-out. Diamonds: the final weights.")
            or note("No run measured an accuracy."),
        ),
        section(
            "What differs in their configurations",
            _side_by_side(names, differ, numbers=False) if differ else note("Nothing."),
        ),
        section("Folders", table(("", "Folder", "Status", "Seed"), folders, words=(0, 1, 2))),
    ]
    return page("Comparison of runs", headline(runs), parts)


_TOLD = (
    "Speed-up is in wall time, against the first run. Decodes saved: against decoding at every"
    " serve of the same run. Bold: the best of the completed runs."
)
CSS = """
table { width: auto } th, td { padding-right: 30px } td:first-child { white-space: nowrap }
.key span { margin-right: 22px; white-space: nowrap } .line { display: inline-block; width: 26px;
  height: 10px; margin-right: 7px; vertical-align: baseline }
"""


def headline(runs: Sequence[Run]) -> str:
    """The last completed run against the first, in one sentence."""
    done = [(run, name) for run, name in zip(runs, labels(runs), strict=True) if _done(run)]
    if len(done) < 2 or done[0][0] is not runs[0]:
        return f"{len(runs)} runs side by side."
    (first, reference), (last, name) = done[0], done[-1]
    parts = []
    before, after = first.number("accuracy"), last.number("accuracy")
    if before is not None and after is not None:
        parts.append(f"{percent(after)} accuracy against {percent(before)}")
    ratio = speed_up(last, first)
    if ratio is not None:
        parts.append(f"{_times(ratio)} as fast")
    if first.decodes and last.decodes is not None:
        change = 1 - last.decodes / first.decodes
        parts.append(f"{percent(abs(change))} {'fewer' if change >= 0 else 'more'} decodes")
    return f'"{name}" against "{reference}": {", ".join(parts) or "nothing to compare"}.'


def _key(number: int, label: str) -> Html:
    colour, dashes = line_style(number)
    dash = f" stroke-dasharray='{' '.join(f'{d:g}' for d in dashes)}'" if dashes else ""
    line = f"<line x1=0 y1=7 x2=26 y2=7 stroke='{colour}' stroke-width=3{dash} />"
    return Html(f"<svg class=line viewBox='0 0 26 10'>{line}</svg>{escape(label)}")


def _side_by_side(
    names: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], numbers: bool = True
) -> str:
    """A column a run, or a row a run if there are many."""
    if len(names) <= ABREAST:
        body = [(name, *line) for name, line in rows]
        words = (0,) if numbers else range(len(names) + 1)
        return table(("", *names), body, words=words)
    body = [(name, *(line[i] for _, line in rows)) for i, name in enumerate(names)]
    words = (0,) if numbers else range(len(rows) + 1)
    return table(("", *(name for name, _ in rows)), body, words=words)


def terminal_table(runs: Sequence[Run]) -> Table:
    """The same table for the terminal."""
    names = [Text(label) for label in labels(runs)]
    rows = [
        (Text(name), [Text(text, style="bold" if best else "") for text, best in line])
        for name, line in cells(runs)
    ]
    if len(runs) <= ABREAST:
        head, body = names, [(name, *line) for name, line in rows]
    else:
        head = [name for name, _ in rows]
        body = [(name, *(line[i] for _, line in rows)) for i, name in enumerate(names)]
    made = Table(box=None, pad_edge=False)
    made.add_column("")
    for name in head:
        made.add_column(name, justify="right")
    for row in body:
        made.add_row(*row)
    return made


# ---- the program --------------------------------------------------------------------------------


def common_parent(folders: Sequence[Path]) -> Path:
    return Path(os.path.commonpath([folder.resolve().parent for folder in folders]))


def _read_all(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """The runs, and a line for each folder that is none."""
    runs: list[Run] = []
    problems: list[str] = []
    seen: set[Path] = set()
    for folder in folders:
        if folder.resolve() in seen:
            problems.append(f"{folder}: given twice; leave one out")
            continue
        seen.add(folder.resolve())
        try:
            runs.append(read_run(folder))
        except RunError as error:
            problems.append(f"{folder}: {error}")
    if len(folders) < 2 and not problems:
        problems.append(f"{folders[0]}: one run is no comparison; give two or more")
    return runs, problems


def main(argv: Sequence[str] | None = None) -> int:
    """The program; returns its exit code."""
    parser = argparse.ArgumentParser(prog="perfect-compare", description="Runs side by side.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--out", type=Path, help="the page (default: compare.html beside the runs)")
    args = parser.parse_args(argv)
    # Where soft_wrap is on, a path stays in one piece.
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    # RUNS/* also finds the page of the last time.
    folders = [path for path in args.runs if not (path.name == "compare.html" and path.is_file())]
    runs, problems = _read_all(folders or args.runs)
    page_path = args.out or (common_parent([run.folder for run in runs]) / "compare.html")
    if not problems:
        try:
            page_path.write_text(comparison(runs), encoding="utf-8")
        except OSError as error:
            problems.append(f"{page_path}: {error.strerror}; give another --out")
    if problems:
        for problem in problems:
            err.print(Text(f"compare: {problem}"), soft_wrap=True)
        return 2
    out.print(terminal_table(runs))
    for remark in remarks(runs):
        out.print(Text(remark), soft_wrap=True)
    out.print(Text(str(page_path)), soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
