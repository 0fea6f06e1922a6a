"""A plugin of pytest that writes down how each test ended as soon as it has. Of a run that is ended
at a test that hangs, pytest itself may say nothing more.

    OUTCOMES/outcomes.tsv    passed, failed or skipped, and the test: a line each
    OUTCOMES/failures.txt    what failed, and where
"""

import os
from pathlib import Path

import pytest

MOST = 30_000
"""Characters of a failure that are kept: its end."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # the process that started it hears of each of its tests
    if report.passed and report.when != "call":
        return
    folder = Path(os.environ["OUTCOMES"])
    if report.failed:
        with (folder / "failures.txt").open("a", encoding="utf-8") as failures:
            failures.write(f"==== {report.nodeid}\n{report.longreprtext[-MOST:]}\n\n")
    with (folder / "outcomes.tsv").open("a", encoding="utf-8") as outcomes:
        outcomes.write(f"{report.outcome}\t{report.nodeid}\n")
