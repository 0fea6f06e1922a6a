"""Claim: which modules plan under OffloadStrategy with nothing but `strategy=` added.

    python benchmarks/module_survey.py                     eight public modules, eighty tiny models
    python benchmarks/module_survey.py --before CHECKOUT   the same with older code beside it

Method  Every module is trained for five steps on two random batches in turns (`--steps`,
        `--batches`): by plain Lightning, then with OffloadStrategy(budget="80%"), with 100% where
        that is too small, and without a budget where it is refused. Each run has a process of its
        own and a time limit. All weights, buffers and optimizer state at the end are compared
        exactly. Weights are random, nothing is downloaded.
Planned Plans ran all steps. A step that asks for values in its middle is run in parts, each by a
        plan of its own up to the next value. The strategy counts the steps of which plans ran all
        parts: if it is not every step, the module is not planned. An operation whose value Python
        waits for (`.item()`, `nonzero`) runs at once, between two parts.
Needs   pip install -e ".[survey]". A module whose package is missing has a row that says so.
Run     `--smoke` takes two modules. OUT/DATE_module_survey.md and .json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from offloading.report import Asked, Report, measure_and_print, table
from provenance import commit_of, versions
from surveyed.outcome import Row, Run, causes, first_line
from surveyed.registry import LIBRARIES, SMOKE, TABLES, cases
from surveyed.survey_options import survey_options

HERE = Path(__file__).parent


def measure(args: argparse.Namespace) -> Report:
    names = [*SMOKE] if args.smoke else (args.only or [*cases()])
    codes = {"now": HERE.parent} | ({"before": args.before.resolve()} if args.before else {})
    with tempfile.TemporaryDirectory(prefix="survey-") as folder:
        work = (args.work or Path(folder)).resolve()
        found = {when: _surveyed(code, when, names, args, work)
                 for when, code in codes.items()}  # fmt: skip
    report = Report(
        "module_survey",
        "Claim: which modules plan under OffloadStrategy with nothing but `strategy=` added",
        {
            "steps": args.steps,
            "batches": args.batches,
            "limit of a run, s": args.limit,
            **versions(LIBRARIES),
        },
    )
    if args.before:
        report.setting["before"] = commit_of(args.before)
    for title, of_table in TABLES.items():
        shown = [case.name for case in of_table if case.name in names]
        if shown:
            report.tables[title] = _table(shown, found)
    for when, rows in found.items():
        report.tables[f"Why there is no plan: {when}"] = _causes(list(rows.values()))
        report.tables[f"Counts: {when}"] = _counts(list(rows.values()))
        report.rows += [
            {"code": when, "name": row.name, "library": row.library, "status": row.status,
             "planned": row.planned, "why": row.why, "runs": [asdict(run) for run in row.runs]}
            for row in rows.values()
        ]  # fmt: skip
    differing = sum(bool(row.best.differing) for row in found["now"].values())
    broken = sum(row.best.error in ("hung", "crashed") for row in found["now"].values())
    report.asked = [
        Asked("modules that train to other bits", 0, differing),
        Asked("modules that hang or crash", 0, broken),
    ]
    report.remarks = [
        'refused: OffloadStrategy(budget="80%") raises and says why, before the first step or at'
        " it. Without a budget such a module is trained eagerly, with a warning.",
        "planned, bit-equal: weights, buffers and optimizer state are compared exactly at the end.",
        "graphs: so many plans were made. The first update, which makes the optimizer's states, has"
        " one of its own, and so has every stretch of a step between two values that it asks for.",
        "The models are tiny: they say what is planned, and nothing about speed or memory.",
    ]
    return report


def _surveyed(
    code: Path, when: str, names: Sequence[str], args: argparse.Namespace, folder: Path
) -> dict[str, Row]:
    """The rows by name, of the code in that folder."""
    kept, plain = folder / when, folder / "plain"
    for one in (kept, plain):
        one.mkdir(parents=True, exist_ok=True)
    print(f"---- {when}", flush=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(code), str(HERE)]), "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    arguments = [str(kept), str(plain), *map(str, (args.limit, args.steps, args.batches)), *names]
    subprocess.run(
        [sys.executable, "-m", "surveyed.host", *arguments], env=environment, cwd=folder, check=True
    )
    every, rows = cases(), {}
    for number, name in enumerate(every):
        if name in names:
            told = json.loads((kept / f"{number}.json").read_text())
            runs = tuple(Run(**run | {"differing": tuple(run["differing"])}) for run in told)
            rows[name] = Row(name, every[name].library, runs)
    return rows


def _table(names: Sequence[str], found: dict[str, dict[str, Row]]) -> str:
    order = [when for when in ("before", "now") if when in found]
    head = ["module", "library", *order, "tasks", "graphs", "why not, now", *(
        ["why not, before"] if "before" in found else [])]  # fmt: skip
    lines = []
    for name in names:
        now = found["now"][name]
        whys = [now.why, *([found["before"][name].why] if "before" in found else [])]
        if whys[1:] == whys[:1] and whys[0]:
            whys[1] = "the same"
        lines.append([
            name, now.library, *(found[when][name].status for when in order),
            str(now.best.tasks or ""), str(now.best.graphs or ""), *(_cell(why) for why in whys),
        ])  # fmt: skip
    return table(head, lines)


def _causes(rows: Sequence[Row]) -> str:
    lines = [
        [str(len(blocked)), _cell(cause), ", ".join(row.name for row in blocked)]
        for cause, blocked in causes(rows)
    ]
    return table(["modules", "cause", "which"], lines) if lines else "Every module is planned."


def _counts(rows: Sequence[Row]) -> str:
    counted = Counter(row.status for row in rows)
    return table(["modules", "status"], [[str(n), status] for status, n in counted.most_common()])


def _cell(text: str) -> str:
    return first_line(text).replace("|", "\\|")


def main() -> None:
    options = survey_options(__doc__, "module", cases())
    options.add_argument("--steps", type=int, default=5)
    options.add_argument("--batches", type=int, default=2, help="different ones, in turns")
    args = options.parse_args()
    measure_and_print(partial(measure, args), args.out / f"{args.date}_module_survey")


if __name__ == "__main__":
    main()
