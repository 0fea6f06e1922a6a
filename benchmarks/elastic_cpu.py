"""Claim: peers come, go and die, and a run neither loses a sample nor waits for long.

    python benchmarks/elastic_cpu.py soak      100 kills with joins: lost, twice, diverged, replayed
    python benchmarks/elastic_cpu.py gaps      how long a death, a frozen peer, no anchor hold up
    python benchmarks/elastic_cpu.py latency   headers and vote of 4 peers
    python benchmarks/elastic_cpu.py reduce    the canonical reduce and gloo's ring, at 400 Mbps
    python benchmarks/elastic_cpu.py speeds    peers of speeds 1 : 2 : 3: the share of the ideal
    python benchmarks/elastic_cpu.py joining   steps while a newcomer copies; hivemind's livelock
    python benchmarks/elastic_cpu.py overhead  one peer against plain Lightning's accumulation
    python benchmarks/elastic_cpu.py peers     the same kill: torchft, hivemind, torchrun (--peers)
    python benchmarks/elastic_cpu.py all       one after the other

Method  Peers are processes of this machine (benchmarks/swarms). Seconds mean something on an idle
        machine only; counts and bits on any. What is compared runs in turns in one run.
Run     `--smoke` takes seconds and says nothing. OUT/DATE_elastic_cpu_PART.md and .json.
        `--peers DIR`: a virtual environment for each of the others is made there, once.
"""

import argparse
import datetime
import logging
import signal
import sys
import warnings
from functools import partial
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for benchmarks.swarms
from elastic.setting import Setting
from offloading.report import Report, measure_and_print

RESULTS = Path(__file__).parent / "results"
PARTS = (
    "soak", "gaps", "latency", "reduce", "speeds", "joining", "overhead", "peers",
)  # fmt: skip


def measure(part: str, args: argparse.Namespace) -> Report:
    """Imports what it needs: a process that measures imports this file, too."""
    return import_module(f"elastic.{part}").measure(Setting(args.smoke, args.repeats, args.work))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", choices=(*PARTS, "all"))
    parser.add_argument("--smoke", action="store_true", help="see that it works: seconds")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--repeats", type=int, default=0, help="rounds; 0: 3, in a smoke run 1")
    parser.add_argument(
        "--work", type=Path, default=None, help="soak: go on with what is in this folder"
    )
    parser.add_argument(
        "--peers", type=Path, default=None, help="peers: where their environments are or shall be"
    )
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    args = parser.parse_args()
    args.repeats = args.repeats or (1 if args.smoke else 3)
    if args.part == "peers":
        args.work = args.peers
    return args


def main() -> None:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no peer is left behind
    warnings.filterwarnings("ignore")
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for part in PARTS if args.part == "all" else (args.part,):
        stem = args.out / f"{args.date}_elastic_cpu_{part}"
        measure_and_print(partial(measure, part, args), stem)


if __name__ == "__main__":
    main()
