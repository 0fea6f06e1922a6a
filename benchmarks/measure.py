"""Measures a claim and writes its result: one module a claim, which says what it compares.

    python -m benchmarks.measure SUITE PART [--smoke] [--rounds N] [--only NAME ...] [--work DIR]
    python -m benchmarks.measure fleet turns      -> results/DATE_fleet_cpu_turns.{md,json}

Method  What is compared runs in turns in one run: `--rounds` rounds, ratios within a round, medians
        and spread. CPU seconds beside wall seconds: a shared machine has neighbours.
        `--smoke` takes seconds and says nothing.
"""

import argparse
import signal
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

from benchmarks.harness.command import (
    Options,
    add_common_options,
    measure_and_write,
    quiet_lightning,
)

PARTS = {
    "offload": ("live", "first_steps", "hand_overs", "several_devices", "estimate"),
    "strategy": ("overhead", "gpt2", "restarts"),
    "fleet": ("turns", "devices", "hand_over", "stopping", "schedules", "kills"),
    "sharing": (
        "latency", "cost", "preemptions", "shared_input", "parked_loaders", "migration",
        "priorities",
    ),
    "elastic": (
        "soak", "gaps", "latency", "reduce", "speeds", "joining", "overhead", "peers",
    ),
    "loader": ("scale",),
}  # fmt: skip
FOLDERS = {"offload": "offloading", "loader": "peers"}
"""Where a suite's modules are, if not in a folder of its name."""


def find_module(suite: str, part: str) -> str:
    return f"benchmarks.{FOLDERS.get(suite, suite)}.{part}"


def list_parts() -> str:
    """Every part with the first line of its module."""
    lines = []
    for suite, parts in PARTS.items():
        for part in parts:
            file = Path(*find_module(suite, part).split(".")[1:]).with_suffix(".py")
            first = (Path(__file__).parent / file).read_text().partition("\n")[0]
            lines.append(f"{suite} {part:16} {first.strip(chr(34))}")
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.measure", epilog=list_parts(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("suite", choices=PARTS)
    parser.add_argument("parts", nargs="+", metavar="PART", help="or `all`")
    parser.add_argument("--rounds", type=int, default=0, help="0: the module's own number")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--work", type=Path, help="elastic soak, peers: keeps what is there")
    add_common_options(parser)
    given = parser.parse_args()
    if given.parts == ["all"]:
        given.parts = [*PARTS[given.suite]]
    if unknown := [part for part in given.parts if part not in PARTS[given.suite]]:
        parser.error(f"{given.suite} has no part {', '.join(unknown)}\n\n{list_parts()}")
    return given


def main() -> None:
    given = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no child is left behind
    quiet_lightning()
    for part in given.parts:
        module = import_module(find_module(given.suite, part))
        rounds = given.rounds or (1 if given.smoke else getattr(module, "ROUNDS", 3))
        options = Options(given.smoke, rounds, tuple(given.only), given.work)
        stem = given.out / f"{given.date}_{given.suite}_cpu_{part}"
        measure_and_write(partial(module.measure, options), stem)


if __name__ == "__main__":
    main()
