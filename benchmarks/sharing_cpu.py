"""Claim: a training answers requests at once and goes on untouched.

    python benchmarks/sharing_cpu.py latency         to the start and to the answer, and three peers
    python benchmarks/sharing_cpu.py cost            a guest at rest, and 10 requests a second
    python benchmarks/sharing_cpu.py preemptions     wrong bits in 1,000 preemptions with evictions
    python benchmarks/sharing_cpu.py shared_input    several trainings on one loader
    python benchmarks/sharing_cpu.py parked_loaders  loaders of jobs that wait for their turns
    python benchmarks/sharing_cpu.py migration       a job moves to another plan or device
    python benchmarks/sharing_cpu.py priorities      a fleet's job of higher priority comes
    python benchmarks/sharing_cpu.py all             one after the other

Method  What is compared runs in turns in one run: `--repeats` rounds, ratios within a round,
        medians and spread. Answers are timed from the moment when they are due.
Run     `--smoke` takes seconds and says nothing. OUT/DATE_sharing_cpu_PART.md and .json.
"""

import argparse
import datetime
import logging
import sys
import warnings
from functools import partial
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for benchmarks.jobs
from offloading.report import Report, measure_and_print

RESULTS = Path(__file__).parent / "results"
PARTS = (
    "latency", "cost", "preemptions", "shared_input", "parked_loaders", "migration",
    "priorities",
)  # fmt: skip


def measure(part: str, smoke: bool, repeats: int) -> Report:
    """Imports what it needs: a process that measures imports this file, too."""
    return import_module(f"sharing.{part}").measure(smoke, repeats)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", choices=(*PARTS, "all"))
    parser.add_argument("--smoke", action="store_true", help="see that it works: seconds")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--repeats", type=int, default=0, help="rounds; 0: 3, in a smoke run 1")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    args = parser.parse_args()
    args.repeats = args.repeats or (1 if args.smoke else 3)
    return args


def main() -> None:
    args = arguments()
    warnings.filterwarnings("ignore")
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for part in PARTS if args.part == "all" else (args.part,):
        stem = args.out / f"{args.date}_sharing_cpu_{part}"
        measure_and_print(partial(measure, part, args.smoke, args.repeats), stem)


if __name__ == "__main__":
    main()
