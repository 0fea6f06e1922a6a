"""Claim: a fleet trains many jobs with the bits that each has alone, at the cost of training them
one after the other on one device, and at the lower bound on several.

    python benchmarks/fleet_cpu.py turns       12 small GPTs on one device, and four other ways
    python benchmarks/fleet_cpu.py devices     jobs that wait like a device's host: 2 and 4 devices
    python benchmarks/fleet_cpu.py hand_over   from one job's last line to the next one's first
    python benchmarks/fleet_cpu.py stopping    device seconds until the best of 12 is known
    python benchmarks/fleet_cpu.py schedules   wrong bits in 100 drawn schedules
    python benchmarks/fleet_cpu.py kills       SIGKILL at 30 random moments, and the same command
    python benchmarks/fleet_cpu.py all         one after the other

Method  What is compared runs in turns in one process: `--repeats` rounds, ratios within a round,
        medians and spread. CPU seconds beside wall seconds: a shared machine has neighbours.
Run     `--smoke` takes seconds and says nothing. OUT/DATE_fleet_cpu_PART.md and .json.
"""

import argparse
import datetime
import logging
import sys
import warnings
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for benchmarks.jobs
from offloading.report import Report, measure_and_print

RESULTS = Path(__file__).parent / "results"
PARTS = ("turns", "devices", "hand_over", "stopping", "schedules", "kills")


def measure(part: str, args: argparse.Namespace) -> Report:
    """Imports what it needs: a process of a device imports this file, too."""
    if part == "turns":
        from fleet import turns

        return turns.measure(args.smoke, args.repeats)
    if part == "devices":
        from fleet import devices

        return devices.measure(args.smoke, args.repeats)
    if part == "hand_over":
        from fleet import hand_over

        return hand_over.measure(args.smoke)
    if part == "stopping":
        from fleet import stopping

        return stopping.measure(args.smoke)
    if part == "schedules":
        from fleet import schedules

        return schedules.measure(args.smoke)
    from fleet import kills

    return kills.measure(args.smoke)


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
        stem = args.out / f"{args.date}_fleet_cpu_{part}"
        measure_and_print(partial(measure, part, args), stem)


if __name__ == "__main__":
    main()
