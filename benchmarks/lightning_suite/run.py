"""Runs Lightning's own tests with and without OffloadStrategy, and prints what differs.

    python -m benchmarks.lightning_suite.run CHECKOUT [--paths loops core] [--out FILE]

CHECKOUT is a checkout of Lightning's repository, of the version that is installed.
"""

import argparse
from pathlib import Path

import lightning as L

from benchmarks.harness.foreign_tests import end_with, run_tests, tell_differences

PATHS = ("trainer", "loops", "models", "checkpointing", "core", "callbacks")
PLUGIN = "benchmarks.lightning_suite.inject"
WANTED = "not ddp and not spawn"
"""Trainers of several processes name a strategy themselves."""

REASONS = {
    "runs on one device, and the trainer has": "the test asks for several devices in the"
    " environment; one-device strategies refuse that",
}
"""By a part of the message of a failure: why the test fails."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--paths", nargs="+", default=PATHS, help="below tests/tests_pytorch")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    given = parser.parse_args()
    tests = given.checkout / "tests"
    there = [path for path in given.paths if (tests / "tests_pytorch" / path).exists()]
    if not there:
        parser.error(f"{given.checkout} has no tests/tests_pytorch with any of {given.paths}")
    arguments = ["-k", WANTED, *(f"tests_pytorch/{path}" for path in there)]
    plain = run_tests(tests, arguments, tests)
    ours = run_tests(tests, ["-p", PLUGIN, *arguments], tests)
    results = {"tests_pytorch": tell_differences(ours, plain, REASONS)}
    end_with(results, given.out, lightning=L.__version__, paths=there)


if __name__ == "__main__":
    main()
