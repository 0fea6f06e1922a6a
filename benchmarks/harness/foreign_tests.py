"""Another project's own tests, run with and without something of ours: what differs, and why.

A test that fails without us, too, says nothing about us and is left out. `reasons` say why each of
the others fails, by a part of its name and failure; a failure without a reason ends the script with
an error. Nothing is fetched: the caller gives a checkout.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).parents[2]
Outcomes = dict[str, str]
"""By test its failure; empty if it passed."""


def run_tests(
    folder: Path, arguments: Sequence[str], path: Path | str, **environment: str
) -> Outcomes:
    """Run pytest in `folder`. Modules are looked for in `path` first."""
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        paths = [str(path), str(ROOT), os.environ.get("PYTHONPATH", "")]
        env = os.environ | environment | {"PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += [f"--junit-xml={report.name}", *arguments]
        subprocess.run(command, cwd=folder, env=env, check=False, stdout=subprocess.DEVNULL)
        return dict(map(_outcome, ElementTree.parse(report.name).iter("testcase")))


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    name = f"{case.get('classname', '').removeprefix('tests_pytorch.')}::{case.get('name')}"
    for kind in ("failure", "error"):
        if (found := case.find(kind)) is not None:
            return name, (found.get("message") or found.text or kind).strip()
    return name, "" if case.find("skipped") is None else "skipped"


def tell_differences(ours: Outcomes, plain: Outcomes, reasons: Mapping[str, str]) -> dict[str, Any]:
    """Print what differs, and return it. `unexplained`: failures without a reason, and tests that
    were run without us alone."""
    alone = {name for name, failure in plain.items() if failure not in ("", "skipped")}
    failed = {n: f for n, f in ours.items() if f not in ("", "skipped") and n not in alone}
    whys = {
        name: next((why for part, why in reasons.items() if part in f"{name} {failure}"), "")
        for name, failure in failed.items()
    }
    passed = sum(not failure for failure in ours.values())
    print(f"{passed} pass, {len(failed)} differ, {len(alone)} fail without us, too")
    for why, count in Counter(whys.values()).most_common():
        print(f"{count:5}  {why or 'NO REASON IS KNOWN'}")
    for name, failure in failed.items():
        print(f"       {name}: {failure.splitlines()[0][:120]}")
    lost = sorted(plain.keys() - ours.keys())
    return {
        "passed": passed, "fail_without_us": sorted(alone),
        "differ": {n: {"reason": whys[n], "message": f[:500]} for n, f in sorted(failed.items())},
        "unexplained": [*(name for name, why in whys.items() if not why), *lost],
    }  # fmt: skip


def end_with(results: Mapping[str, Mapping[str, Any]], out: Path | None, **about: Any) -> None:
    """Write the results by file, and end with an error if something is unexplained."""
    if out is not None:
        told = {"torch": str(torch.__version__), **about, **results}
        out.write_text(json.dumps(told, indent=1) + "\n")
    if unexplained := [name for found in results.values() for name in found["unexplained"]]:
        sys.exit(f"without a reason, or not run to the end: {', '.join(unexplained)}")
