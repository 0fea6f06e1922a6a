"""`python -m perfect.train config.yaml [--check] [--out DIR]`: one run, or a grid of runs.

    read YAML -> a run: open folder -> build -> fit (resumes) -> judge -> report
              -> a grid: a job for each point -> a fleet trains them in turns -> report of all
              -> --join HOST:PORT: this node trains a run together with others

The same command resumes what was interrupted; of a finished run it only says that it is complete.
Exit codes: 0 all is done, 1 a run or a job failed (or --check found that it would), 2 the
configuration or the folder is wrong, 130 Ctrl-C stopped it.
"""

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from perfect.command_line import (
    TRACEBACKS,
    importing,
    new_parser,
    print_plain,
    run_command,
    show_traceback,
)

if TYPE_CHECKING:
    from perfect.commands.check_cards import CardOptions
    from perfect.config.grid import Grid
    from perfect.config.schema import RunConfig
    from perfect.config.yaml_reader import Source

log = logging.getLogger(__name__)

LOGGERS = ("perfect", "loaders", "offload", "trainers", "trainers.offloading")
SHOWN_LOGGERS = ("perfect", "trainers.offloading")
"""These loggers show INFO without --verbose."""
RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
"""Lightning tells a process its rank by the first of these that is set."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = new_parser("perfect-train", "Train as a YAML file says.")
    parser.add_argument("config", type=Path, help="the YAML file of a run, or of a grid of runs")
    parser.add_argument("--check", action="store_true", help="print what would run, and exit")
    cards = parser.add_argument_group("with --check: cards that are not here")
    cards.add_argument("--device", metavar="NAMES", help="such as rtx4090,2xh100,card.json")
    cards.add_argument("--steps", type=int, default=1000, help="of the run (default: 1000)")
    cards.add_argument("--hours", type=float, help="the longest that the steps may take")
    cards.add_argument("--price", metavar="NAME=DOLLARS", help="of an hour, such as h200=3.5")
    cards.add_argument("--json", action="store_true", help="print all figures for a program")
    parser.add_argument("--out", type=Path, help="run folder (default: runs/NAME of the YAML)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="a key in place of the file's, such as loader.batch_size=64; may be repeated",
    )
    before = parser.add_mutually_exclusive_group()
    before.add_argument("--resume", action="store_true", help="refuse to begin a new run")
    before.add_argument(
        "--fresh", action="store_true", help="begin a new run; an old one in its folder is renamed"
    )
    parser.add_argument("--join", help="anchors of a swarm to train with: HOST:PORT[,HOST:PORT...]")
    parser.add_argument("--name", default="", help="this node's name in the swarm")
    logged = parser.add_mutually_exclusive_group()
    logged.add_argument(
        "-v", "--verbose", action="count", default=0, help="log more (-v: INFO, -vv: DEBUG)"
    )
    logged.add_argument("-q", "--quiet", action="store_true", help="log only errors and results")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    return run_command(parser, _run, argv)


def _run(args: argparse.Namespace) -> int:
    console = Console(stderr=True, soft_wrap=True)
    _configure_logging(args, console)
    if args.check and args.fresh:
        return _refuse(console, ["--fresh renames a folder, and --check changes none: give one"])
    if wrong := _wrong_card_options(args):
        return _refuse(console, [wrong])
    log.info("reading %s", args.config)
    with importing():
        from perfect.config.grid_reader import read_recipe
        from perfect.errors import ConfigError, FolderError
        from perfect.runs.kept_runs import check_resumable, put_aside
    out = args.out or Path("runs") / args.config.stem
    try:
        recipe, source = read_recipe(args.config, args.settings)
        if wrong := _wrong_options(args, recipe):
            return _refuse(console, [source.describe(("elastic",), wrong)])
        if args.resume:
            check_resumable(out)
        if args.fresh and not is_other_rank() and (old := put_aside(out)):
            print_plain(console, f"the run that was in {out} is in {old} now")
    except ConfigError as error:
        return _refuse(console, error.problems)
    except FolderError as error:
        return _refuse(console, [str(error)])
    return _do(args, recipe, source, out, console)


def _do(
    args: argparse.Namespace,
    recipe: "RunConfig | Grid",
    source: "Source",
    out: Path,
    console: Console,
) -> int:
    """Import what trains, and do what the options say."""
    log.info("importing PyTorch and Lightning")
    with importing():
        from offload import OffloadError
        from offload.estimating.card import CardError
        from perfect.assembly.berth import berth_alone
        from perfect.commands.check import print_plan
        from perfect.commands.check_cards import print_estimate
        from perfect.commands.training import train, train_as_peer
        from perfect.config.schema import RunConfig
        from perfect.errors import BuildError, FolderError, PhaseError
        from perfect.grids.grid_check import check_grid
        from perfect.grids.grid_run import run_grid
        from perfect.runs.folder import RunFolder
        from trainers.fleet import FleetError
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR if args.quiet else logging.WARNING)
    try:
        if not isinstance(recipe, RunConfig):
            if args.device:
                return _refuse(console, ["--device estimates one run, and this file is a grid"])
            shown = Console(soft_wrap=True)
            return check_grid(recipe, shown) if args.check else run_grid(recipe, out, console)
        if args.device:
            print_estimate(recipe, _card_options(args), out, Console(soft_wrap=True))
            return 0
        if args.check:
            print_plan(recipe, out, Console(soft_wrap=True))
            return 0
        folder = RunFolder(out)
        if recipe.elastic is not None:
            return train_as_peer(recipe, folder, console, args.join, args.name)
        # All ranks would print the same, but each prints what ends it.
        return train(
            recipe, folder, berth_alone(Console(quiet=True) if is_other_rank() else console)
        )
    except BuildError as error:
        wrong = [error, *error.others]
        return _refuse(console, [source.describe(tuple(e.key.split(".")), e.reason) for e in wrong])
    except (FolderError, FleetError, PhaseError, CardError) as error:
        return _refuse(console, [str(error)])
    except OffloadError as error:  # --check found what would end the run
        show_traceback()
        print_plain(console, str(error), style="red")
        return 1


def _card_options(args: argparse.Namespace) -> "CardOptions":
    from perfect.commands.check_cards import CardOptions

    price: dict[str, float] = {}
    for pair in filter(None, (args.price or "").split(",")):
        name, _, dollars = pair.partition("=")
        price[name.strip()] = float(dollars)
    names = [name.strip() for name in args.device.split(",") if name.strip()]
    return CardOptions(names, args.steps, args.hours, price, args.json)


def is_other_rank() -> bool:
    """Whether Lightning has started this process for another rank than the first."""
    return int(next((os.environ[name] for name in RANKS if name in os.environ), 0)) > 0


def _wrong_card_options(args: argparse.Namespace) -> str | None:
    """Say what is wrong with the options about cards."""
    given = [name for name in ("hours", "price", "json") if getattr(args, name)]
    if args.device is None and (given or args.steps != 1000):
        return f"--{(*given, 'steps')[0]} is about a card: give --check --device NAMES, too"
    if args.device is not None and not args.check:
        return "--device is about a card that is not here: give --check, too"
    if args.device is not None and not args.device.strip(", "):
        return "--device names no card: give some, such as rtx4090,2xh100"
    if args.steps < 1 or (args.hours is not None and not args.hours > 0):
        return f"--steps {args.steps} and --hours {args.hours} must be above 0"
    for pair in filter(None, (args.price or "").split(",")):
        try:
            float(pair.partition("=")[2])
        except ValueError:
            return f"--price {pair!r} is no price: give NAME=DOLLARS, such as h200=3.5"
    return None


def _wrong_options(args: argparse.Namespace, recipe: "RunConfig | Grid") -> str | None:
    """Say what the options and the section `elastic` miss of each other."""
    elastic = getattr(recipe, "elastic", None)
    if elastic is None and (args.join or args.name):
        option = "--join" if args.join else "--name"
        return f"is missing, but {option} was given: give elastic: {{secret_file: FILE}}"
    if elastic is not None and not args.join and not args.check:
        return "a run with this section joins a swarm: give --join HOST:PORT, the anchor's address"
    return None


def _refuse(console: Console, problems: list[str]) -> int:
    show_traceback()
    for problem in problems:
        print_plain(console, problem)
    return 2


def _configure_logging(args: argparse.Namespace, console: Console) -> None:
    only_errors = args.quiet or is_other_rank()
    usual = logging.ERROR if args.quiet else logging.WARNING
    logging.basicConfig(level=usual, handlers=[_Lines(console)], format="%(message)s", force=True)
    for name in LOGGERS:
        logging.getLogger(name).setLevel(
            logging.ERROR if only_errors
            else logging.DEBUG if args.verbose > 1
            else logging.INFO if args.verbose or name in SHOWN_LOGGERS
            else logging.NOTSET
        )  # fmt: skip
    TRACEBACKS.setLevel(logging.DEBUG if args.traceback else logging.INFO)
    if args.quiet:
        warnings.simplefilter("ignore")
    # Lightning 2.6 under torch 2.15 warns of its own code, which users cannot change.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)`")
    # A run may have no hold-out, and --check says so.
    warnings.filterwarnings("ignore", message="You defined a `validation_step` but have no")


class _Lines(logging.Handler):
    """Prints what is logged. A line is as long as its text: a path in it can be copied."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        print_plain(self._console, self.format(record).lstrip("\n"))


if __name__ == "__main__":
    sys.exit(main())
