"""Claim: which modules plan under OffloadStrategy with nothing but `strategy=` added.

    python -m benchmarks.surveyed [--smoke] [--only MODULE ...]

Method   Every module is trained for five steps on two random batches in turns: by plain Lightning,
         then with OffloadStrategy(budget="80%"), with 100% where that is too small, and without a
         budget where it is refused. Each run is a process with a time limit. All weights, buffers
         and optimizer state at the end are compared exactly. Nothing is downloaded.
Baseline plain Lightning's bits. Ceiling: every module planned within 80 %.
Needs    pip install -e ".[survey]". A module whose package is missing has a row that says so.
"""

import argparse
import multiprocessing
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.command import add_common_options, measure_and_write
from benchmarks.harness.machine import list_versions
from benchmarks.harness.report import Report, Target, format_table
from benchmarks.surveyed.table import LIBRARIES, SMOKE, TABLES, list_cases
from benchmarks.surveyed.training import PLAIN, TrainingRun, train_to_file

SHARE = "80%"
LONGEST = 400
"""Characters of a reason."""


@dataclass(frozen=True, slots=True)
class SurveyRow:
    """A module and its runs."""

    name: str
    library: str
    runs: tuple[TrainingRun, ...]

    @property
    def best(self) -> TrainingRun:
        """With a budget if that trained, else without one, else whatever ended first."""
        return next((run for run in self.runs if not run.error), self.runs[0])

    @property
    def status(self) -> str:
        first, best, last = self.runs[0], self.best, self.runs[-1]
        if best.budget == PLAIN:
            return "not installed" if best.error == "missing" else "plain run fails"
        if best.error:
            return best.error if best.error in ("hung", "crashed") else f"fails: {best.error}"
        bits = f"{len(best.differing)} of {best.compared} differ" if best.differing else "bit-equal"
        if last.budget == PLAIN and last.differing:
            bits += f", {len(last.differing)} of plain Lightning's own second run"
        if not best.planned:
            return f"eager, {bits}" if not first.error else f"{first.error}; eager, {bits}"
        if best is first:
            return f"planned, {bits}"
        return f"planned, {bits} (budget {best.budget}: {first.budget} fails, {first.error})"

    @property
    def planned(self) -> bool:
        """Within a budget: without one, steps that come once are run as issued."""
        return self.status.startswith("planned, bit-equal") and self.best.budget != "none"

    @property
    def why(self) -> str:
        """The first line of what stands against a plan; empty if nothing does."""
        if self.planned:
            return ""
        reasons = [run.said for run in self.runs if run.said and run.error != "BudgetTooSmall"]
        line = next(iter((reasons or [self.runs[0].said])[0].strip().splitlines()), "")
        return line[:LONGEST].replace("|", "\\|")


def survey(names: Sequence[str], limit: float, steps: int, batches: int) -> list[SurveyRow]:
    """One process a run; they are forks of one that has imported torch and our code."""
    children: Any = multiprocessing.get_context("forkserver")
    children.set_forkserver_preload(["benchmarks.surveyed.training"])
    rows = []
    for name in names:
        with tempfile.TemporaryDirectory(prefix="survey-") as place:
            run = partial(_run_child, children, Path(place), limit, name, (steps, batches))
            row = SurveyRow(name, list_cases()[name].library, tuple(_run_case(run)))
        print(f"{name} | {row.status} | {row.why}", flush=True)
        rows.append(row)
    return rows


def _run_case(run: Any) -> list[TrainingRun]:
    plain = run(PLAIN)
    if plain.error:
        return [plain]
    runs = [run(SHARE)]
    if runs[0].error:
        runs.append(run("100%" if runs[0].error == "BudgetTooSmall" else "none"))
    if any(one.differing for one in runs):
        runs.append(run(PLAIN))  # does plain Lightning repeat itself?
    return runs


def _run_child(
    children: Any, folder: Path, limit: float, name: str, steps: tuple[int, int], budget: str
) -> TrainingRun:
    answer = folder / "answer.json"
    answer.unlink(missing_ok=True)
    child = children.Process(target=train_to_file, args=(name, budget, *steps, str(folder)))
    child.start()
    child.join(limit)
    if child.exitcode is None:
        child.kill()
        child.join()
        return TrainingRun(budget, error="hung", said=f"no end after {limit:g} s")
    if not answer.exists():
        return TrainingRun(budget, error="crashed", said=f"exit code {child.exitcode}")
    return TrainingRun.read(answer)


def measure(given: argparse.Namespace) -> Report:
    names = [*SMOKE] if given.smoke else (given.only or [*list_cases()])
    rows = survey(names, given.limit, given.steps, given.batches)
    setting = {"steps": given.steps, "batches": given.batches, **list_versions(LIBRARIES)}
    report = Report(
        "module_survey",
        "Claim: which modules plan under OffloadStrategy with nothing but `strategy=` added",
        setting,
    )
    head = ["module", "library", "now", "tasks", "graphs", "why not"]
    for title, cases in TABLES.items():
        shown = {case.name for case in cases}
        lines = [
            [row.name, row.library, row.status, str(row.best.tasks or ""),
             str(row.best.graphs or ""), row.why]
            for row in rows if row.name in shown
        ]  # fmt: skip
        if lines:
            report.tables[title] = format_table(head, lines)
    counts = Counter(row.status for row in rows).most_common()
    report.tables["Counts"] = format_table(
        ["modules", "status"], [[str(count), status] for status, count in counts]
    )
    report.rows = [
        {"name": row.name, "library": row.library, "status": row.status, "planned": row.planned,
         "why": row.why, "runs": [asdict(run) for run in row.runs]}
        for row in rows
    ]  # fmt: skip
    report.asked = [
        Target("modules that train to other bits", 0, sum(bool(r.best.differing) for r in rows)),
        Target("modules that hang or crash", 0,
               sum(row.best.error in ("hung", "crashed") for row in rows)),
    ]  # fmt: skip
    report.remarks = [
        "planned: plans ran all steps; a step that asks for values in its middle is run in parts,"
        " each by a plan of its own. graphs: so many plans were made.",
        "The models are tiny: they say what is planned, and nothing about speed or memory.",
    ]
    return report


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.surveyed")
    parser.add_argument("--only", nargs="+", default=[], choices=[*list_cases()], metavar="MODULE")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds of a run's process")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batches", type=int, default=2, help="different ones, in turns")
    add_common_options(parser)
    given = parser.parse_args()
    measure_and_write(partial(measure, given), given.out / f"{given.date}_module_survey")


if __name__ == "__main__":
    main()
