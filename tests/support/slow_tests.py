"""`make slow-tests`: which tests are dear, in units that mean the same on every machine.

A unit is what `calibrate` takes in the process that runs the test. Seconds are those of the CPU:
of all threads, and of child processes that were waited for.
"""

from collections import defaultdict
from collections.abc import Generator
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from time import process_time

import pytest

LISTED = 40


def calibrate() -> float:
    """The CPU seconds of one unit: a loop of plain Python, the quickest of three."""
    taken = []
    for _ in range(3):
        begun, total = process_time(), 0
        for number in range(2_000_000):
            total += number & 7
        taken.append(process_time() - begun)
    return min(taken)


def spent() -> float:
    """The CPU seconds of this process and of its children so far."""
    both = getrusage(RUSAGE_SELF), getrusage(RUSAGE_CHILDREN)
    return sum(one.ru_utime + one.ru_stime for one in both)


class SlowTests:
    """A plugin that measures each test with its fixtures, and lists the dearest at the end."""

    def __init__(self) -> None:
        self._unit = calibrate()
        self._before = 0.0
        self._tests: dict[str, float] = defaultdict(float)
        self._files: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        now = spent()
        report = yield
        report.user_properties.append(("units", (now - self._before) / self._unit))
        self._before = now
        return report

    def pytest_runtest_logstart(self) -> None:
        self._before = spent()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        units = next(value for name, value in report.user_properties if name == "units")
        assert isinstance(units, float)
        self._tests[report.nodeid] += units
        self._files[report.nodeid.partition("::")[0]] += units

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"dearest tests (1.0 is {self._unit:.2f} CPU seconds here)")
        for title, units in (("files", self._files), ("tests", self._tests)):
            terminalreporter.line(f"{sum(units.values()):8.1f}  all {title}")
            for name in sorted(units, key=units.__getitem__, reverse=True)[:LISTED]:
                terminalreporter.line(f"{units[name]:8.1f}  {name}")
