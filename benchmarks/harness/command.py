"""From options to result files: what `python -m benchmarks.measure` does for each claim."""

import argparse
import datetime
import logging
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.machine import describe_run
from benchmarks.harness.report import Report, write_report

RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True, slots=True)
class Options:
    """What a claim's `measure(options)` is given."""

    smoke: bool = False
    """Tiny sizes: that it works."""
    rounds: int = 3
    only: tuple[str, ...] = ()
    """Names of models or cases; empty: all of them."""
    work: Path | None = None
    """A folder that outlives the run, where the claim's module says what for."""


def add_common_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--smoke", action="store_true", help="see that it works: seconds")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result files")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="of the result")


def measure_and_write(measure: Callable[[], Report], stem: Path) -> None:
    """Measure; write `stem`.md and `stem`.json; print the tables."""
    load = os.getloadavg()[0]
    report = measure()
    machine = {**describe_run(), "load_before": load}
    print(write_report(report, stem, machine, typed_command()), flush=True)


def typed_command() -> str:
    """What was typed to measure this."""
    file = Path(sys.argv[0])
    module = file.parent.name if file.name == "__main__.py" else file.stem
    return " ".join([f"python -m benchmarks.{module}", *sys.argv[1:]])


def quiet_lightning() -> None:
    """Lightning's hints, and all warnings, would hide the tables."""
    warnings.filterwarnings("ignore")
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
