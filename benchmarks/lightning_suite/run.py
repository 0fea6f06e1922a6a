"""Runs Lightning's own tests with and without OffloadStrategy, and prints what differs.

    python -m benchmarks.lightning_suite.run CHECKOUT [--paths loops core] [--out FILE]

CHECKOUT is a checkout of Lightning's repository, of the version that is installed; nothing is
fetched. A test that fails without us, too, says nothing about us and is left out. `REASONS` says
why each of the others fails; a failure without a reason ends the script with an error.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import lightning as L
import torch

PATHS = ("trainer", "loops", "models", "checkpointing", "core", "callbacks")
PLUGIN = "benchmarks.lightning_suite.inject"
ROOT = Path(__file__).parent.parent.parent
WANTED = "not ddp and not spawn"
"""Trainers of several processes name a strategy themselves."""

REASONS = {
    "runs on one device, and the trainer has": "the test asks for several devices in the"
    " environment; one-device strategies refuse that",
}
"""By a part of the message of a failure: why the test fails."""


def outcomes(checkout: Path, paths: Sequence[str], ours: bool) -> dict[str, str]:
    """Run the tests; return by test its failure, empty if it passed."""
    tests = checkout / "tests"
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        python_path = [str(tests), str(ROOT), os.environ.get("PYTHONPATH", "")]
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", WANTED),
            *(["-p", PLUGIN] if ours else []),
            f"--junit-xml={report.name}",
            *(f"tests_pytorch/{path}" for path in paths),
        ]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(python_path)}
        subprocess.run(command, cwd=tests, env=env, check=False, stdout=subprocess.DEVNULL)
        return dict(map(_outcome, ElementTree.parse(report.name).iter("testcase")))


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    name = f"{case.get('classname', '').removeprefix('tests_pytorch.')}::{case.get('name')}"
    for kind in ("failure", "error"):
        if (found := case.find(kind)) is not None:
            return name, (found.get("message") or found.text or kind).strip()
    return name, "" if case.find("skipped") is None else "skipped"


def reason(message: str) -> str:
    return next((why for part, why in REASONS.items() if part in message), "")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--paths", nargs="+", default=PATHS, help="below tests/tests_pytorch")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    given = parser.parse_args()
    there = [
        path for path in given.paths if (given.checkout / "tests/tests_pytorch" / path).exists()
    ]
    if not there:
        parser.error(f"{given.checkout} has no tests/tests_pytorch with any of {given.paths}")
    plain, ours = (outcomes(given.checkout, there, injected) for injected in (False, True))
    alone = {name for name, failure in plain.items() if failure not in ("", "skipped")}
    failed = {n: f for n, f in ours.items() if f not in ("", "skipped") and n not in alone}
    lost = sorted(plain.keys() - ours.keys())
    passed = sum(not failure for failure in ours.values())
    print(f"{passed} passed, {len(failed)} failed, {len(alone)} fail without us, too")
    for why, count in Counter(reason(f) or "NO REASON" for f in failed.values()).most_common():
        print(f"{count:5d}  {why}")
    for name, failure in failed.items():
        print(
            f"\n{name}\n    {reason(failure) or 'NO REASON'}\n    {failure.splitlines()[0][:200]}"
        )
    if given.out is not None:
        rows = {n: {"reason": reason(f), "message": f[:500]} for n, f in sorted(failed.items())}
        about = {"lightning": L.__version__, "torch": torch.__version__, "paths": there}
        counts = {"passed": passed, "failed": len(failed), "fail_without_us": sorted(alone)}
        given.out.write_text(json.dumps({**about, **counts, "failures": rows}, indent=1) + "\n")
    if lost or not all(map(reason, failed.values())):
        sys.exit(f"{len(lost)} tests were not run to the end; or a failure has no reason")


if __name__ == "__main__":
    main()
