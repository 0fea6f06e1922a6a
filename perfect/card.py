"""`perfect-card measure [--device DEVICE] [--out FILE]`: the rates of this machine as a file.

It takes about a minute on a machine that does nothing else. `perfect-train --check --device FILE`
says what a step would take there. Exit codes: 0 the file is written, 2 it cannot be.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from perfect.command_line import importing, new_parser, run_command


def main(argv: Sequence[str] | None = None) -> int:
    parser = new_parser("perfect-card", "Measure this machine as a card for estimates.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    measure = commands.add_parser("measure", help="write the rates of this machine")
    measure.add_argument("--device", default="", help="cuda:0 or cpu (default: a GPU, if any)")
    measure.add_argument(
        "--out", type=Path, default=Path("card.json"), help="the file (default: card.json)"
    )
    return run_command(parser, _measure, argv)


def _measure(args: argparse.Namespace) -> int:
    sys.stderr.write("importing PyTorch\n")
    with importing():
        import torch

        from offload import OffloadError
        from offload.estimating.card_measuring import measure_card
    try:
        device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        card = measure_card(device, args.out.stem)
        args.out.write_text(card.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except (OffloadError, OSError, RuntimeError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    for check in card.checks:
        off = check.predicted / check.measured - 1
        sys.stdout.write(f"{check.name}: {check.measured:.4f} s, predicted {off:+.0%}\n")
    sys.stdout.write(f"wrote {args.out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
