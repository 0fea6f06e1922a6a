"""`perfect-replay RUN [RUN ...]`: trains a swarm's run again in one process, and compares.

    RUN/config.yaml, RUN/elastic/*.jsonl of each peer -> every step again -> its digest against the
    log's; at the end of a run its weights against RUN/final.ckpt

The folders are only read, and classes that config.yaml names are only imported with --trust, as
their code would run. Together, the logs must reach back to the first step. Exit codes: 0 every step
is equal, 1 a step differs, 2 a folder holds no run of a swarm, or logs disagree.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from perfect.command_line import importing, new_parser, print_plain, run_command, silence_lightning


def main(argv: Sequence[str] | None = None) -> int:
    parser = new_parser("perfect-replay", "Train a swarm's run again.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a peer's run folder")
    parser.add_argument(
        "--trust", action="store_true", help="import the classes that config.yaml names"
    )
    return run_command(parser, _replay, argv)


def _replay(args: argparse.Namespace) -> int:
    sys.stderr.write("importing PyTorch and Lightning\n")
    with importing():
        from rich.console import Console

        from loaders import LoaderError
        from offload import OffloadError
        from perfect.commands.replaying import replay
        from perfect.errors import PerfectError
        from trainers.elastic.errors import ElasticError, ReplayDiffers
        from trainers.read_checkpoint import CheckpointRefused
    console = Console(soft_wrap=True)
    silence_lightning()
    try:
        result = replay(args.runs, console, trust=args.trust)
    except ReplayDiffers as error:
        print_plain(console, f"different: {error}")
        return 1
    except (PerfectError, ElasticError, LoaderError, OffloadError, CheckpointRefused) as error:
        print_plain(Console(stderr=True), str(error))
        return 2
    console.print(result, highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
