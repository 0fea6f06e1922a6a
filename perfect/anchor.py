"""`perfect-anchor --listen HOST:29400 --secret-file FILE`: where the peers of a swarm meet.

It holds no weights, and may run beside a peer. It says in a line who comes, goes and trains. It
ends when all peers have ended their run, or with Ctrl-C; training goes on without it, and waits
for it only where a peer comes or goes. Exit codes: 0 ended, 2 something given is wrong, 130 Ctrl-C.
"""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

from perfect.command_line import handled, new_parser, run_command
from trainers.elastic.anchor.anchor import Anchor
from trainers.elastic.deciding.roster import Settings
from trainers.elastic.wire.address import Address
from trainers.elastic.wire.secret import read_secret
from trainers.elastic.wire.wire_errors import InsecureNetwork, WireError


def main(argv: Sequence[str] | None = None) -> int:
    usual = Settings()
    parser = new_parser("perfect-anchor", "Let peers of a swarm meet.")
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="often port 29400")
    parser.add_argument("--secret-file", required=True, help="every peer has a copy of it")
    parser.add_argument(
        "--min-peers",
        type=int,
        default=usual.min_peers,
        help=f"fewer do not train (default {usual.min_peers})",
    )
    parser.add_argument(
        "--heartbeat",
        type=float,
        default=usual.heartbeat,
        help=f"seconds of silence after which a peer is expelled (default {usual.heartbeat:g})",
    )
    parser.add_argument(
        "--other-anchors",
        action="store_true",
        help="peers know other anchors, too, so a minority that is cut off must not train",
    )
    parser.add_argument(
        "--standby",
        action="store_true",
        help="peers ask another anchor first: a run goes on here, and none begins",
    )
    parser.add_argument(
        "--insecure-network", action="store_true", help="allow to listen on all interfaces"
    )
    parser.add_argument(
        "--loose-key", action="store_true", help="take a secret file that others may use"
    )
    return run_command(parser, lambda args: _listen(parser, args), argv)


def _listen(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    if args.min_peers < 1:
        parser.error(f"--min-peers {args.min_peers}: give 1 or more")
    if not args.heartbeat > 0:
        parser.error(f"--heartbeat {args.heartbeat:g}: give seconds above 0")
    alone = not (args.other_anchors or args.standby)
    settings = Settings(args.min_peers, args.heartbeat, only_anchor=alone, standby=args.standby)
    try:
        address = Address.parse(args.listen)
        anchor = Anchor(
            address.host,
            address.port,
            read_secret(args.secret_file, loose=args.loose_key),
            settings,
            insecure_network=args.insecure_network,
            log_line=_print_line,
        )
    except (WireError, OSError) as error:
        if isinstance(error, InsecureNetwork):
            error = InsecureNetwork(error.fact, "--insecure-network")
        sys.stderr.write(f"perfect-anchor: {error}\n")
        return 2
    return _serve(anchor)


def _serve(anchor: Anchor) -> int:
    signals_received: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        signals_received.append(number)
        anchor.stop()

    with handled(signal.SIGINT, stop), handled(signal.SIGTERM, stop), anchor:
        _print_line(f"listening at {anchor.address}")
        anchor.run()
    return 130 if signal.SIGINT in signals_received else 0


def _print_line(line: str) -> None:
    """Print a line with its time. A full disk or a closed pipe must not end the anchor."""
    encoding = sys.stdout.encoding
    shown = line.encode(encoding, errors="backslashreplace").decode(encoding)
    with suppress(OSError):
        sys.stdout.write(f"{time.strftime('%H:%M:%S')} {shown}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
