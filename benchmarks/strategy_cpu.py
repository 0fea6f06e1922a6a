"""Claim: OffloadStrategy gives plain Lightning's bits in every setting and at every budget, costs
no CPU time when everything is resident (10 % of a step of 6 ms), and uses the memory that it said,
to 1 %.

    python benchmarks/strategy_cpu.py overhead   CPU time a step, all resident, five models
    python benchmarks/strategy_cpu.py gpt2       GPT-2-small in 25 % of its peak: every loss
    python benchmarks/strategy_cpu.py plan       seconds until the first step, predicted peak
    python benchmarks/strategy_cpu.py matrix     what differs, over models, settings and budgets
    python benchmarks/strategy_cpu.py lengths    24 lengths in turns: seconds a step, pass by pass
    python benchmarks/strategy_cpu.py restarts   the first step of a second start, with plan_cache
    python benchmarks/strategy_cpu.py all        one after the other

Method  `trainer.fit` as a user calls it, with and without the strategy, in a process each; what is
        compared steps in turns in one run: `--repeats` rounds, ratios within a round, medians and
        spread. CPU seconds, because wall time on a shared machine measures the neighbours.
Run     `--smoke` takes seconds and says nothing. OUT/DATE_strategy_cpu_PART.md and .json.
"""

import argparse
import datetime
from functools import partial
from pathlib import Path

from offloading.report import Report, measure_and_print

RESULTS = Path(__file__).parent / "results"
PARTS = ("overhead", "gpt2", "plan", "matrix", "lengths", "restarts")


def measure(part: str, args: argparse.Namespace) -> Report:
    """Imports what it needs: a child that measures imports this file, too."""
    if part == "overhead":
        from strategy import overhead

        return overhead.measure(args.smoke, args.repeats, args.only)
    if part == "gpt2":
        from strategy import gpt2

        return gpt2.measure(args.smoke)
    if part == "plan":
        from strategy import plan

        return plan.measure(args.smoke)
    if part == "lengths":
        from strategy import lengths

        return lengths.measure(args.smoke, args.repeats)
    if part == "restarts":
        from strategy import restarts

        return restarts.measure(args.smoke, args.repeats)
    from strategy import matrix

    return matrix.measure(args.smoke)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", choices=(*PARTS, "all"))
    parser.add_argument("--smoke", action="store_true", help="see that it works: seconds")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--repeats", type=int, default=0, help="rounds; 0: 7, in a smoke run 1")
    parser.add_argument("--only", nargs="+", default=[], metavar="MODEL", help="of `overhead`")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    args = parser.parse_args()
    args.repeats = args.repeats or (1 if args.smoke else 7)
    return args


def main() -> None:
    args = arguments()
    for part in PARTS if args.part == "all" else (args.part,):
        stem = args.out / f"{args.date}_strategy_cpu_{part}"
        measure_and_print(partial(measure, part, args), stem)


if __name__ == "__main__":
    main()
