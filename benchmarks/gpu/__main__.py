"""benchmarks/gpu/run.sh PART [--smoke] [--out DIR] [--minutes 8.5] [--retry] [--only WORD ...]

    a ceilings   b equality   c peaks   d speed   e peers   i fleet
    j sharing

Run it again until it says that nothing is missing; start with a. `--smoke`: every path with tiny
models, in seconds; its numbers say nothing. Without a GPU it runs on the fake one:

    python tests/fakecuda/on_gpu.py benchmarks/gpu/run.sh PART --smoke
"""

import argparse
import datetime
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.gpu.child import launch
from benchmarks.gpu.gpu_machine import absent, device_name, record
from benchmarks.gpu.part import MODULES, Found, Job, Part, Step, load
from benchmarks.gpu.store import Store
from benchmarks.harness.report import format_table, write_report

RESULTS = Path(__file__).parents[1] / "results"
TAIL = 0.25
"""Minutes that are left for the report."""


def main() -> None:
    args = arguments()
    if not torch.cuda.is_available():
        raise SystemExit(
            "no CUDA device: this suite measures a GPU. See that it works on the fake one:"
            " python tests/fakecuda/on_gpu.py benchmarks/gpu/run.sh PART --smoke"
        )
    device = "cuda"
    part = load(args.part)
    stem = f"gpu_{part.NAME}{'_smoke' if args.smoke else ''}"
    store = Store(args.out, stem, device_name(device))
    if args.retry:
        store.forget_failures()
    steps = _asked_for(part.steps(args.smoke), args.only)
    if gone := absent():
        print(f"not installed: {', '.join(gone)}", flush=True)
    _measure(steps, store, args, device)
    found = store.found(
        [cell for step in part.steps(args.smoke) for cell in step.cells], args.smoke
    )
    print(_written(part, found, args, device), flush=True)
    if found.missing:
        print("not finished: run the same command again")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu/run.sh", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("part", choices=list(MODULES))
    parser.add_argument("--smoke", action="store_true", help="tiny models: that it works")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--minutes", type=float, default=8.5, help="begin nothing after so many")
    parser.add_argument("--retry", action="store_true", help="measure again what failed")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="of a cell's name")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    return parser.parse_args()


def _asked_for(steps: Sequence[Step], words: Sequence[str]) -> list[Step]:
    """With those of their cells whose name has one of the words in it."""
    every = [cell for step in steps for cell in step.cells]
    for word in words:
        if not any(word in cell for cell in every):
            known = "\n    ".join(every)
            raise SystemExit(
                f"--only {word!r}: no cell has this in its name. There are\n    {known}"
            )
    return [
        replace(step, cells=tuple(c for c in step.cells if any(w in c for w in words or [""])))
        for step in steps
    ]


def _measure(steps: list[Step], store: Store, args: argparse.Namespace, device: str) -> None:
    """What is missing, step by step, while there is time."""
    deadline = time.monotonic() + 60 * (args.minutes - TAIL)
    begun = False
    for step in steps:
        fruitless = 0
        while cells := store.missing(step.cells):
            left = deadline - time.monotonic()
            # The first one begins in any case: who gives too little time is told so.
            if begun and left < 60 * step.minutes:
                break
            print(f"{step.run}: {', '.join(cells)}", flush=True)
            work = str(store.path.with_suffix(".work"))
            job = Job(
                step.run, tuple(cells), step.arguments, device, args.smoke, work
            )  # fmt: skip
            problem, late = launch(job, store, max(1.0, left), step.environment)
            still = store.missing(cells)
            first, begun = not begun, True
            if late and (not first or len(still) < len(cells)):
                break  # what comes next has all of the next call's time
            fruitless = fruitless + 1 if len(still) == len(cells) else 0
            _blame(still, problem, fruitless, store)


def _blame(still: list[str], problem: str, fruitless: int, store: Store) -> None:
    """The first cell that did not come is the one that failed. If a second process brings none
    either, it is what they share."""
    blamed = still if not problem or fruitless > 1 else still[:1]
    for cell in blamed:
        store.add(cell, None, problem or "the step ended without it")
        print(f"{cell}: failed: {problem}", flush=True)


def _written(part: Part, found: Found, args: argparse.Namespace, device: str) -> str:
    """Write the report as Markdown and JSON, and return its text."""
    report = part.report(found)
    if found.problems:
        lines = [[cell, problem.replace("|", "/")] for cell, problem in found.problems.items()]
        report.tables["What failed"] = format_table(["cell", "why"], lines)
    if found.missing:
        report.asked = [asked for asked in report.asked if asked.measured is not None]
        report.tables["Not yet measured"] = ", ".join(found.missing)
    report.rows = [{"cell": cell, **row} for cell, row in found.rows.items()]
    report.rows += [{"cell": cell, "problem": why} for cell, why in found.problems.items()]
    stem = args.out / f"{args.date}_gpu_{part.NAME}{'_smoke' if found.smoke else ''}"
    if found.smoke:
        report.remarks.append("A smoke run: that it works. Its numbers say nothing.")
    words = ["benchmarks/gpu/run.sh", args.part, *(["--smoke"] if args.smoke else [])]
    return write_report(report, stem, record(device), " ".join(words))


if __name__ == "__main__":
    main()
