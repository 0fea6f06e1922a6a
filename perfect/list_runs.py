"""`perfect-runs ls|show|cp|rm`: what has run, where, in which state, how accurately.

    ls [FOLDER ...]     a line for each run and grid below (default: runs)
    show RUN            all that a run has come to, and its files
    cp RUN TO           a copy that goes on elsewhere: perfect-train TO/config.yaml --out TO
    rm RUN ... [--yes]  removes them; it asks before, and leaves what a process trains in

Only records are read, so no torch is imported. Exit codes: 0 done, 2 a folder holds no run, 130
Ctrl-C.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perfect.command_line import new_parser, run_command
from perfect.errors import FolderError, PerfectError, RunError
from perfect.report.words import accuracy, count, duration, legible
from perfect.runs.kept_runs import check_idle, copy_kept, is_held, kept_below


def main(argv: Sequence[str] | None = None) -> int:
    parser = new_parser("perfect-runs", "List, show, copy and remove what has run.")
    actions = parser.add_subparsers(metavar="ls|show|cp|rm", required=True)
    listed = actions.add_parser("ls", help="a line for each run and grid below these folders")
    listed.add_argument("folders", nargs="*", type=Path, default=[Path("runs")], metavar="FOLDER")
    listed.set_defaults(act=_list)
    shown = actions.add_parser("show", help="all that a run has come to")
    shown.add_argument("folder", type=Path, metavar="RUN")
    shown.set_defaults(act=_show)
    copied = actions.add_parser("cp", help="copy a run, which goes on from there")
    copied.add_argument("folder", type=Path, metavar="RUN")
    copied.add_argument("to", type=Path, metavar="TO")
    copied.set_defaults(act=_copy)
    removed = actions.add_parser("rm", help="remove runs")
    removed.add_argument("folders", nargs="+", type=Path, metavar="RUN")
    removed.add_argument("--yes", action="store_true", help="do not ask")
    removed.set_defaults(act=_remove)
    return run_command(parser, _act, argv)


def _act(args: argparse.Namespace) -> int:
    try:
        return args.act(args)
    except (PerfectError, OSError) as error:
        of = f"{args.folder}: " if isinstance(error, RunError) else ""
        sys.stderr.write(f"perfect-runs: {of}{error}\n")
        return 2


def _list(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("run", "state", "steps", "accuracy", "time"):
        table.add_column(column, justify="left" if column in ("run", "state") else "right")
    problems: list[str] = []
    for folder in (kept for root in args.folders for kept in kept_below(root)):
        try:
            state, record = _state_of(folder)
        except (RunError, OSError) as error:
            state, record = "damaged", {}
            problems.append(f"perfect-runs: {folder}: {error}")
        table.add_row(
            Text(legible(str(folder))),
            state,
            count(record.get("steps")),
            accuracy(record.get("accuracy")),
            duration(record.get("wall_seconds")),
        )
    if not table.row_count:
        where = ", ".join(map(str, args.folders))
        raise FolderError(f"there is no run in {where}: give the folder that holds your runs")
    console = Console()
    console.width = console.width if console.is_terminal else max(console.width, 160)
    console.print(table)
    sys.stderr.writelines(f"{legible(problem)}\n" for problem in problems)
    return 2 if problems else 0


def _state_of(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return a run's state in a word, and its record, or raise RunError. A run whose record says
    that it is running, and whose process is gone, was killed."""
    from perfect.report.results import read_run

    if (folder / "grid.yaml").is_file():
        return "a grid, running" if is_held(folder) else "a grid", {}
    if not (folder / "run.json").is_file():
        return "running" if is_held(folder) else "not begun", {}
    record = dict(read_run(folder).record)
    killed = record["status"] == "running" and not is_held(folder)
    return "killed" if killed else record["status"], record


def _show(args: argparse.Namespace) -> int:
    from perfect.report.results import read_run

    folder = args.folder
    record = dict(read_run(folder).record)
    shown = {"folder": folder, "state": _state_of(folder)[0]}
    words = {
        "seed": str, "accuracy": accuracy, "accuracy_on": str, "perplexity": "{:.2f}".format,
        "best_accuracy": accuracy, "steps": count, "wall_seconds": duration,
        "decoded_samples": count, "served_samples": count, "error": str,
    }  # fmt: skip
    shown |= {key: show(record[key]) for key, show in words.items() if record.get(key) is not None}
    for row in record.get("phases", []):
        first, last = (count(row[step]) for step in ("first_step", "last_step"))
        shown[f"phase {row['name']}"] = f"steps {first} to {last}"
    shown["files"] = ", ".join(sorted(path.name for path in folder.iterdir()))
    for name, value in shown.items():
        label = name.removesuffix("_seconds").replace("_", " ")
        line = legible(f"{label:16} {' '.join(str(value).splitlines())}")
        sys.stdout.write(f"{line}\n")
    return 0


def _copy(args: argparse.Namespace) -> int:
    copy_kept(args.folder, args.to)
    kind = "grid.yaml" if (args.to / "grid.yaml").is_file() else "config.yaml"
    message = legible(f"it goes on with: perfect-train {args.to / kind} --out {args.to}")
    sys.stdout.write(f"{message}\n")
    return 0


def _remove(args: argparse.Namespace) -> int:
    for folder in args.folders:
        check_idle(folder)
    if not args.yes:
        if not sys.stdin.isatty():
            raise FolderError("rm asks before it removes, and nobody can answer here: give --yes")
        asked = input(f"remove {', '.join(map(str, args.folders))}? [y/N] ")
        if asked.strip().lower() not in ("y", "yes"):
            return 0
    for folder in args.folders:
        try:
            if folder.exists():  # it may have gone with a grid that was named before it
                shutil.rmtree(folder)
        except OSError as error:
            raise FolderError(f"{folder} could not be removed: {error}") from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
