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
import sys
import warnings
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from rich.logging import RichHandler

from loaders import LoaderError
from offload import DeviceLost, OffloadError
from perfect.assembly import Alone, Berth, InSwarm
from perfect.commands.check import print_plan
from perfect.commands.training import train_run
from perfect.config.grid import Grid
from perfect.config.grid_reader import read_recipe
from perfect.config.schema import RunConfig, dump_config
from perfect.errors import (
    BuildError,
    ConfigError,
    FolderError,
    Interrupted,
    LossNotFinite,
    PhaseError,
)
from perfect.grids.grid_check import check_grid
from perfect.grids.grid_run import run_grid
from perfect.runs.folder import RunFolder
from trainers.elastic.errors import ElasticError, Expelled
from trainers.fleet import FleetError

MOST_RETURNS = 20
"""So often an expelled peer joins again."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="perfect-train", description="Train as a YAML file says.")
    parser.add_argument("config", type=Path)
    parser.add_argument("--check", action="store_true", help="print what would run, and exit")
    parser.add_argument("--out", type=Path, help="run folder (default: runs/NAME of the YAML)")
    parser.add_argument("--join", help="anchors of a swarm to train with: HOST:PORT[,HOST:PORT...]")
    parser.add_argument("--name", default="", help="this node's name in the swarm")
    args = parser.parse_args(argv)
    out = args.out or Path("runs") / args.config.stem
    console = Console(stderr=True, soft_wrap=True)
    _configure_logging(console)
    try:
        recipe, source = read_recipe(args.config)
    except ConfigError as error:
        return _refuse(console, error.problems)
    if wrong := _wrong_options(args, recipe):
        return _refuse(console, [source.at(("elastic",), wrong)])
    try:
        if isinstance(recipe, Grid):
            shown = Console(soft_wrap=True)
            return check_grid(recipe, shown) if args.check else run_grid(recipe, out, console)
        if args.check:
            print_plan(recipe, out, Console(soft_wrap=True))
            return 0
        folder = RunFolder(out)
        if recipe.elastic is not None:
            return train_as_peer(recipe, folder, console, args.join, args.name)
        # Ranks would all say the same, but each says what ends it.
        return train(recipe, folder, Alone(Console(quiet=True) if is_other_rank() else console))
    except BuildError as error:
        found = [error, *error.others]
        return _refuse(console, [source.at(tuple(e.key.split(".")), e.reason) for e in found])
    except (FolderError, FleetError, PhaseError) as error:
        return _refuse(console, [str(error)])
    except OffloadError as error:  # --check found what would end the run
        _say(console, str(error), style="red")
        return 1


def train_as_peer(
    config: RunConfig, folder: RunFolder, console: Console, join: str, name: str
) -> int:
    """Train with a swarm to the end of the run. A peer that is expelled comes again."""
    for _ in range(MOST_RETURNS):
        try:
            return train(config, folder, InSwarm(console, folder, join, name))
        except Expelled as error:
            _say(console, f"expelled: {error}; this peer joins again")
    _say(console, f"this peer was expelled {MOST_RETURNS} times, and gives up", style="red")
    return 1


def train(config: RunConfig, folder: RunFolder, berth: Berth) -> int:
    """Train from the last checkpoint, or from the beginning, to the end of the run."""
    console, errors = berth.console, Console(stderr=True, soft_wrap=True)
    errors = errors if console.quiet else console
    if folder.open(dump_config(config)) == "completed":
        console.print(f"{folder.path} is complete: see {folder.report}", highlight=False)
        return 0
    try:
        train_run(config, folder, berth)
    except Interrupted as error:
        console.print(f"{error}; the same command resumes it", highlight=False)
        return 130
    except (KeyboardInterrupt, SystemExit):  # Lightning turns the former into the latter
        console.print("stopped at once; the same command resumes the run from its last checkpoint")
        return 130
    except OffloadError as error:
        _say(errors, str(error), style="red")
        if isinstance(error, DeviceLost):
            _say(errors, _how_to_continue(folder))
        return 1
    except Expelled:
        raise
    except (LossNotFinite, LoaderError, PhaseError, ElasticError) as error:
        _say(errors, "; ".join([str(error), *getattr(error, "__notes__", [])]), style="red")
        return 1
    return 0


def is_other_rank() -> bool:
    """Whether Lightning has started this process for another rank than the first."""
    return bool(getattr(rank_zero_only, "rank", 0))


def _wrong_options(args: argparse.Namespace, recipe: RunConfig | Grid) -> str | None:
    """Say what the options and the section `elastic` miss of each other."""
    elastic = recipe.elastic if isinstance(recipe, RunConfig) else None
    if elastic is None and (args.join or args.name):
        option = "--join" if args.join else "--name"
        return f"is missing, but {option} was given: give elastic: {{secret_file: FILE}}"
    if elastic is not None and not args.join and not args.check:
        return "a run with this section joins a swarm: give --join HOST:PORT, the anchor's address"
    return None


def _how_to_continue(folder: RunFolder) -> str:
    """Say how to continue after a device was lost. This process cannot use the device any more."""
    step = folder.checkpoint_step()
    if step is None:
        return "there is no checkpoint yet: the same command begins anew"
    return f"the same command resumes from the last checkpoint: {folder.checkpoint}, step {step}"


def _refuse(console: Console, problems: list[str]) -> int:
    for problem in problems:
        _say(console, problem)
    return 2


def _say(console: Console, text: str, style: str | None = None) -> None:
    """Print the text as it is: brackets in an error are not markup."""
    console.print(text, style=style, highlight=False, markup=False)


def _configure_logging(console: Console) -> None:
    handler = RichHandler(console=console, show_path=False, show_time=False, show_level=False)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], format="%(message)s", force=True)
    logging.getLogger("perfect").setLevel(logging.ERROR if is_other_rank() else logging.INFO)
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # Lightning 2.6 under torch 2.15 warns of its own code, which users cannot change.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)`")
    # A run may have no hold-out, and --check says so.
    warnings.filterwarnings("ignore", message="You defined a `validation_step` but have no")


if __name__ == "__main__":
    sys.exit(main())
