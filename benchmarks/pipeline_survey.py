"""Claim: which ordinary data pipelines plug into the reuse loader as they are, or as its docs ask.

    python benchmarks/pipeline_survey.py                     public pipelines with made-up data
    python benchmarks/pipeline_survey.py --before CHECKOUT   the same with older code beside it

Method  Every pipeline is written as its tutorial or repository writes it, and given unchanged to
        `ReuseLoader.from_dataloader`; where that raises, with the change that
        docs/loader/plugging-in.md asks for. Then a pass with reuse=2 is compared
        with the pipeline itself: structure of batches, serves of each sample,
        draws, and a resume in mid-pass. With reuse=1 and without random
        steps, a pass has to be what the data set gives, batch by batch. Each pipeline has a
        process of its own and a time limit. Nothing is downloaded.
Needs   pip install -e ".[survey]". A pipeline whose package is missing has a row that says so.
Run     `--smoke` takes two pipelines. OUT/DATE_pipeline_survey.md and .json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from offloading.report import Asked, Report, measure_and_print, table
from provenance import commit_of, versions
from surveyed.survey_options import survey_options
from surveyed_pipelines.pipeline_case import COUNT
from surveyed_pipelines.pipeline_registry import LIBRARIES, SMOKE, TABLES, pipelines
from surveyed_pipelines.pipeline_rows import Attempt, PipelineRow, counted

HERE = Path(__file__).parent


def measure(args: argparse.Namespace) -> Report:
    names = [*SMOKE] if args.smoke else (args.only or [*pipelines()])
    codes = {"before": args.before, "now": args.now}
    codes = {when: code.resolve() for when, code in codes.items() if code is not None}
    with tempfile.TemporaryDirectory(prefix="survey-") as folder:
        work = (args.work or Path(folder)).resolve()
        found = {when: _surveyed(code, when, names, args.limit, work)
                 for when, code in codes.items()}  # fmt: skip
    report = Report(
        "pipeline_survey",
        "Claim: which ordinary data pipelines plug into the reuse loader",
        {
            "pipelines": len(names),
            "samples": COUNT,
            "limit of a pipeline, s": args.limit,
            **{f"{when} is": commit_of(code) for when, code in codes.items()},
            **versions(LIBRARIES),
        },
    )
    report.tables["Counts"] = _counts(found)
    for title, of_table in TABLES.items():
        shown = [case.name for case in of_table if case.name in names]
        if shown:
            report.tables[title] = _table(shown, found)
    for when, rows in found.items():
        if any(row.refused for row in rows.values()):
            report.tables[f"What a pipeline as it is is told: {when}"] = _refusals(rows)
        report.rows += [
            {"code": when, "name": row.name, "status": row.status,
             "attempts": [asdict(each) for each in row.attempts]}
            for row in rows.values()
        ]  # fmt: skip
    now = [row.last for row in found["now"].values()]
    report.asked = [
        Asked("pipelines that are served wrongly", 0, sum(bool(each.wrong) for each in now)),
        Asked("pipelines that hang or crash", 0,
              sum(each.error in ("hung", "crashed") for each in now)),
        Asked("pipelines that fail by themselves", 0, sum(each.error == "broken" for each in now)),
    ]  # fmt: skip
    report.remarks = [
        "plugs in: ReuseLoader.from_dataloader(dataloader) serves it. After the documented change:"
        " from_dataloader(dataloader) raises, and the pipeline is served with that change.",
        "checked: structure (nests, dtypes and shapes of a batch are the DataLoader's), twice (with"
        " reuse=2 a pass serves every sample twice), draws (the two serves of a sample differ where"
        " the pipeline is random, and are equal where it is not), content (with reuse=1 and without"
        " random steps a batch is what the collate function makes of what the data set gives: equal"
        " or up to the difference that is named), resume (a state saved in mid-pass goes on with"
        " equal batches).",
        "WRONG: it is served, and a check does not hold.",
        "A pipeline has the shape of the public one, and neither its code nor its data.",
    ]
    return report


def _surveyed(
    code: Path, when: str, names: Sequence[str], limit: float, work: Path
) -> dict[str, PipelineRow]:
    """The rows by name, of the code in that folder."""
    kept = work / when
    kept.mkdir(parents=True, exist_ok=True)
    print(f"---- {when}: {code}", flush=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(code), str(HERE)]), "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "HF_HOME": str(kept / "hub"),
        "NO_ALBUMENTATIONS_UPDATE": "1",
    }  # fmt: skip
    numbers = {name: str(number) for number, name in enumerate(pipelines())}
    asked = [word for name in names for word in (numbers[name], name)]
    subprocess.run(
        [sys.executable, "-m", "surveyed_pipelines.pipeline_host", str(kept), str(limit), *asked],
        env=environment, cwd=kept, check=True,
    )  # fmt: skip
    rows = {}
    for name in names:
        told = json.loads((kept / f"{numbers[name]}.json").read_text())
        rows[name] = PipelineRow(name, tuple(Attempt(**each) for each in told))
    return rows


def _table(names: Sequence[str], found: dict[str, dict[str, PipelineRow]]) -> str:
    head = ["pipeline", "as in", *found, "checked, now", "cached and redone, now"]
    lines = []
    for name in names:
        now = found["now"][name]
        lines.append([
            name, pipelines()[name].source, *(_cell(rows[name].told) for rows in found.values()),
            now.facts, _cell(now.redone),
        ])  # fmt: skip
    return table(head, lines)


def _refusals(rows: dict[str, PipelineRow]) -> str:
    lines = [[row.name, _cell(row.refused)] for row in rows.values() if row.refused]
    return table(["pipeline", "the error's first line"], lines)


def _counts(found: dict[str, dict[str, PipelineRow]]) -> str:
    lines = [
        [when, str(count), kind]
        for when, rows in found.items()
        for kind, count in counted([*rows.values()]).items()
    ]
    return table(["code", "pipelines", "status"], lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> None:
    options = survey_options(__doc__, "pipeline", pipelines())
    options.add_argument("--now", type=Path, metavar="CHECKOUT", default=HERE.parent,
                         help="of the code to survey, if not that of this script")  # fmt: skip
    args = options.parse_args()
    measure_and_print(partial(measure, args), args.out / f"{args.date}_pipeline_survey")


if __name__ == "__main__":
    main()
