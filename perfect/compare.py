"""`python -m perfect.compare RUN_DIR RUN_DIR ...` shows runs side by side, in one page.

    RUN_DIR, RUN_DIR, ... --read_run--> Run, Run, ... --measures--> the same table twice:
                                             |                      terminal and compare.html
                                             +--> the same numbers: compare.json
                                             +--> accuracy over steps, decodes, seconds

The other runs are measured against `--baseline`, or else the first run without reuse. A run has
the same colour everywhere. Every wrong folder is reported in one line (`compare: FOLDER: what; what
to do`), the others are shown, and the exit code is 2. An unfinished run is shown and marked; it has
no speed-up and cannot be the best.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from perfect.command_line import new_parser, run_command
from perfect.errors import RunError
from perfect.report.measures import (
    baseline_of,
    cells,
    common_parent,
    differences,
    figures_as_numbers,
    labels,
    remarks,
    speed_up,
)
from perfect.report.page import Html, note, page, plot, section, table
from perfect.report.panels import KEY_CSS, accuracy_figure, line_key
from perfect.report.results import Run, read_run
from perfect.report.words import DASH, accuracy, fewer, legible, times

Cell = TypeVar("Cell", str, Text)
WRITTEN = ("compare.html", "compare.json")
ABREAST = 5
"""More runs than this are shown as rows instead of columns."""


def comparison(runs: Sequence[Run], baseline: Run) -> str:
    """Return the page as HTML."""
    names = [line_key(i, label) for i, label in enumerate(labels(runs))]
    rows = [
        (name, [Html(f"<b>{escape(text)}</b>") if best else text for text, best in line])
        for name, line in cells(runs, baseline)
    ]
    differ = differences(runs)
    key = Html("<p class=key>" + " ".join(f"<span>{name}</span>" for name in names) + "</p>")
    folders = [
        (name, legible(str(run.folder)), run.status, run.record.get("seed", DASH))
        for name, run in zip(names, runs, strict=True)
    ]
    parts = [
        f"<style>{CSS}{KEY_CSS}</style>",
        section(
            "Figures",
            _side_by_side(names, rows),
            note(f"{_CAPTION} {' '.join(remarks(runs, baseline))}"),
        ),
        section(
            "Accuracy",
            key,
            plot(accuracy_figure(runs), "Lines show the hold-out, diamonds the final weights.")
            or note("No run measured an accuracy."),
        ),
        section(
            "What differs in their configurations",
            _side_by_side(names, differ, numbers=False) if differ else note("They do not differ."),
        ),
        section("Folders", table(("", "Folder", "Status", "Seed"), folders, words=(0, 1, 2))),
    ]
    return page("Comparison of runs", headline(runs, baseline), parts)


_CAPTION = (
    "Decodes saved are counted against decoding at every serve of the same run. The best of the"
    " completed runs is bold."
)
CSS = """
table { width: auto } th, td { padding-right: 30px } td:first-child { white-space: nowrap }
"""


def headline(runs: Sequence[Run], baseline: Run) -> str:
    """Compare each other completed run with the baseline in one sentence."""
    named = list(zip(runs, labels(runs), strict=True))
    others = [(run, name) for run, name in named if run.completed and run is not baseline]
    if not others or not baseline.completed or len(runs) > ABREAST:
        return f"{len(runs)} runs side by side."
    [reference] = [name for run, name in named if run is baseline]
    return " ".join(
        f'"{name}" against "{reference}": {_compare_pair(baseline, run) or "nothing to compare"}.'
        for run, name in others
    )


def _compare_pair(baseline: Run, run: Run) -> str:
    parts = []
    before, after = baseline.number("accuracy"), run.number("accuracy")
    if before is not None and after is not None:
        parts.append(f"{accuracy(after)} accuracy against {accuracy(before)}")
    ratio = speed_up(run, baseline)
    if ratio is not None:
        parts.append(f"{times(ratio)} as fast")
    if baseline.decodes and run.decodes is not None:
        parts.append(fewer(1 - run.decodes / baseline.decodes))
    return ", ".join(parts)


def _arrange_cells(
    names: Sequence[Cell], rows: Sequence[tuple[Cell, Sequence[Cell]]]
) -> tuple[list[Cell], list[tuple[Cell, ...]]]:
    """Return head and body of the table, with a column for each run, or a row if there are many."""
    if len(names) <= ABREAST:
        return [*names], [(name, *line) for name, line in rows]
    body = [(name, *(line[i] for _, line in rows)) for i, name in enumerate(names)]
    return [name for name, _ in rows], body


def _side_by_side(
    names: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], numbers: bool = True
) -> str:
    head, body = _arrange_cells(names, rows)
    return table(("", *head), body, words=(0,) if numbers else range(len(head) + 1))


def terminal_table(runs: Sequence[Run], baseline: Run) -> Table:
    """Return the same table for the terminal."""
    names = [Text(label) for label in labels(runs)]
    rows = [
        (Text(name), [Text(text, style="bold" if best else "") for text, best in line])
        for name, line in cells(runs, baseline)
    ]
    head, body = _arrange_cells(names, rows)
    made = Table(box=None, pad_edge=False)
    made.add_column("")
    for name in head:
        made.add_column(name, justify="right")
    for row in body:
        made.add_row(*row)
    return made


def _read_all(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Return the runs, and one line for each folder that holds none."""
    runs: list[Run] = []
    problems: list[str] = []
    seen: set[str] = set()
    for folder in folders:
        if (place := os.path.realpath(folder)) in seen:
            problems.append(f"{folder}: is given twice; leave one out")
            continue
        seen.add(place)
        try:
            runs.append(read_run(folder))
        except RunError as error:
            problems.append(f"{folder}: {error}")
    if len(folders) < 2 and not problems:
        problems.append(f"{folders[0]}: is the only run; give two or more")
    return runs, problems


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program, and return its exit code."""
    parser = new_parser("perfect-compare", "Show runs side by side.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument(
        "--out",
        type=Path,
        help="the page (default: compare.html beside the runs); its numbers lie beside it as .json",
    )
    parser.add_argument(
        "--baseline",
        metavar="RUN",
        help="the folder or name of the run that the others are measured against (default: the"
        " first without reuse)",
    )
    return run_command(parser, lambda args: _compare(parser, args), argv)


def _compare(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    if args.out is not None and args.out.suffix == ".json":
        parser.error(f"--out {args.out}: this is the page's path; end it in .html")
    # With soft_wrap a long path is not broken.
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    # RUNS/* also matches what an earlier comparison wrote.
    folders = [path for path in args.runs if not (path.name in WRITTEN and path.is_file())]
    runs, problems = _read_all(folders or args.runs)
    page_path, baseline = args.out, None
    if runs and len(folders) > 1:
        try:
            baseline = baseline_of(runs, args.baseline)
        except RunError as error:
            problems.append(f"--baseline {args.baseline}: {error}")
    if baseline is not None:
        page_path = args.out or (common_parent([run.folder for run in runs]) / "compare.html")
        try:
            page_path.write_text(comparison(runs, baseline), encoding="utf-8")
            numbers = json.dumps(figures_as_numbers(runs, baseline), indent=1) + "\n"
            page_path.with_suffix(".json").write_text(numbers, encoding="utf-8")
        except OSError as error:
            problems.append(f"{page_path}: {error.strerror}; give another --out")
            baseline = None
    for problem in problems:
        err.print(Text(legible(f"compare: {problem}")), soft_wrap=True)
    if baseline is None:
        return 2
    out.print(terminal_table(runs, baseline))
    for remark in remarks(runs, baseline):
        out.print(Text(remark), soft_wrap=True)
    out.print(Text(legible(str(page_path))), soft_wrap=True)
    return 2 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
