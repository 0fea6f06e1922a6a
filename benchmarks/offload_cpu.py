"""Claim: a step planned to 40 % of its memory costs 1.15x eager and the copies, one without copies
1.03x; 100,000 tasks are planned in 150 s, and the loop costs 1 us a task (5 us with threads).

    python benchmarks/offload_cpu.py planner    seconds and memory of planning against task count
    python benchmarks/offload_cpu.py overhead   what the loop costs a task, with empty kernels
    python benchmarks/offload_cpu.py models     steps of four models against eager, bit for bit
    python benchmarks/offload_cpu.py orders     priority against random and in order, simulated
    python benchmarks/offload_cpu.py workers    updates by 1 to 16 workers of the host, simulated
    python benchmarks/offload_cpu.py hand_overs   residents out and in again, between two jobs
    python benchmarks/offload_cpu.py all        one after the other

Method  CPU seconds of the whole process, because wall time on a shared machine measures the
        neighbours. What is compared is interleaved in one run: `--repeats` rounds after a warm-up
        round, in another order each, ratios within a round, medians and spread. What could disturb
        something else has a process of its own. Beside every number: eager or the floor, and the
        ceiling (memcpy of the same bytes, a bare loop, the bound).
Run     `--smoke` takes seconds and says nothing. OUT/DATE_offload_cpu_PART.md and .json.
"""

import argparse
import datetime
from functools import partial
from pathlib import Path

from offloading.report import Report, measure_and_print

RESULTS = Path(__file__).parent / "results"
PARTS = ("planner", "overhead", "models", "orders", "workers", "hand_overs")


def measure(part: str, args: argparse.Namespace) -> Report:
    """Imports what it needs: a child that measures imports this file, too."""
    if part == "planner":
        from offloading import planner

        return planner.measure(args.smoke, args.repeats)
    if part == "overhead":
        from offloading import overhead

        return overhead.measure(args.smoke, args.repeats)
    if part == "models":
        from offloading import models

        return models.measure(args.smoke, args.repeats, args.only, args.engine)
    if part == "workers":
        from offloading import workers

        return workers.measure(args.smoke)
    if part == "hand_overs":
        from offloading import hand_overs

        return hand_overs.measure(args.smoke, args.repeats)
    from offloading import orders

    return orders.measure(args.smoke)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", choices=(*PARTS, "all"))
    parser.add_argument("--smoke", action="store_true", help="see that it works: seconds")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--repeats", type=int, default=0, help="rounds; 0: 7, in a smoke run 1")
    parser.add_argument("--only", nargs="+", default=[], metavar="MODEL", help="of `models`")
    parser.add_argument("--engine", choices=("threads", "serial"), default="threads")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    args = parser.parse_args()
    args.repeats = args.repeats or (1 if args.smoke else 7)
    return args


def main() -> None:
    args = arguments()
    for part in PARTS if args.part == "all" else (args.part,):
        only = "".join(f"_{name}" for name in args.only) if part == "models" else ""
        stem = args.out / f"{args.date}_offload_cpu_{part}{only}"
        measure_and_print(partial(measure, part, args), stem)


if __name__ == "__main__":
    main()
