"""`python -m perfect.train config.yaml [--check] [--out DIR]`: one run, from YAML to report.

    read config -> open run folder -> build -> fit (resumes from a checkpoint) -> judge -> report

The same command resumes an interrupted run; of a finished run it only says that it is complete.
Exit codes: 0 the run is done, 1 it failed (or --check found that it would), 2 the configuration or
the folder is wrong, 130 Ctrl-C stopped it.
"""

import argparse
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from rich.logging import RichHandler

from loaders import LoaderError
from offload import DeviceLost, OffloadError
from perfect.assembly import (
    build_data,
    build_module,
    build_phase_switch,
    build_trainer,
    to_blame,
    watched,
)
from perfect.commands.check import print_plan
from perfect.commands.judge import judge
from perfect.config.schema import RunConfig, dump_config
from perfect.config.yaml_reader import read_config
from perfect.errors import (
    BuildError,
    ConfigError,
    FolderError,
    Interrupted,
    LossNotFinite,
    PhaseError,
    RunError,
)
from perfect.report import write_report
from perfect.runs.folder import RunFolder
from perfect.runs.record import RunLog, describe_run, measured
from perfect.runs.stall_log import stall_log
from perfect.runs.stop import StopSignal


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="perfect-train", description="Train as a YAML file says.")
    parser.add_argument("config", type=Path)
    parser.add_argument("--check", action="store_true", help="print what would run, and exit")
    parser.add_argument("--out", type=Path, help="run folder (default: runs/NAME of the YAML)")
    args = parser.parse_args(argv)
    out = args.out or Path("runs") / args.config.stem
    console = Console(stderr=True, soft_wrap=True)
    _configure_logging(console)
    try:
        config, source = read_config(args.config)
    except ConfigError as error:
        return _refuse(console, error.problems)
    try:
        if args.check:
            print_plan(config, out, Console(soft_wrap=True))
            return 0
        return train(config, RunFolder(out), console)
    except BuildError as error:
        return _refuse(console, [source.at(tuple(error.key.split(".")), error.reason)])
    except (FolderError, PhaseError) as error:
        return _refuse(console, [str(error)])
    except OffloadError as error:  # --check found what would end the run
        _say(console, str(error), style="red")
        return 1


def train(config: RunConfig, folder: RunFolder, console: Console) -> int:
    """Train from the last checkpoint, or from the beginning, to the end of the run."""
    plain = dump_config(config)
    if folder.open(plain) == "completed":
        console.print(f"{folder.path} is complete: see {folder.report}", highlight=False)
        return 0
    L.seed_everything(config.seed, verbose=False)
    data = build_data(config)
    module = build_module(config, data.num_classes)
    switch = build_phase_switch(config)
    log = RunLog(folder.path)
    stop = StopSignal(console)
    trainer = build_trainer(config, folder.path, switch, log, stop, data)
    resumed_step = folder.checkpoint_step()
    if resumed_step is not None:
        log.resume(resumed_step)
        console.print(f"resuming {folder.path} after step {resumed_step}", highlight=False)
    folder.begin(plain)
    run = describe_run(
        name=folder.path.name,
        seed=config.seed,
        config=plain,
        resumed_at=folder.resumed_at(resumed_step),
    )
    folder.write(run)
    status, code = "failed", 1
    try:
        loaders: dict[str, Any] = (
            {"datamodule": data.datamodule}
            if data.datamodule is not None
            else {"train_dataloaders": data.train, "val_dataloaders": data.holdout}
        )
        ckpt = str(folder.checkpoint) if resumed_step is not None else None
        with watched(trainer):
            trainer.fit(module, **loaders, ckpt_path=ckpt, weights_only=True)
            run |= measured(switch, log, trainer)
            with switch.averaged(module):
                trainer.save_checkpoint(folder.final, weights_only=True)
            run |= judge(trainer, module, data, switch)
        status, code = "completed", 0
    except Interrupted as error:
        status, code = "interrupted", 130
        console.print(f"{error}; the same command resumes it", highlight=False)
    except (KeyboardInterrupt, SystemExit):  # Lightning turns the former into the latter
        status, code = "interrupted", 130
        console.print("stopped at once; the same command resumes the run from its last checkpoint")
    except OffloadError as error:
        run["error"] = str(error)
        if refused := to_blame(error):
            raise refused from error
        _say(console, str(error), style="red")
        if isinstance(error, DeviceLost):
            _say(console, _how_to_continue(folder))
    except (LossNotFinite, LoaderError, PhaseError) as error:
        run["error"] = "; ".join([str(error), *getattr(error, "__notes__", [])])
        _say(console, run["error"], style="red")
    except BaseException as error:
        run["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        log.save()
        if status != "completed":
            run |= measured(switch, log, trainer)
        folder.write(run | {"status": status})
        _report(folder, run, trainer, console)
        data.close()
    return code


def _how_to_continue(folder: RunFolder) -> str:
    """Say how to continue after a device was lost. This process cannot use the device any more."""
    step = folder.checkpoint_step()
    if step is None:
        return "there is no checkpoint yet: the same command begins anew"
    return f"the same command resumes from the last checkpoint: {folder.checkpoint}, step {step}"


@rank_zero_only
def _report(folder: RunFolder, run: dict[str, Any], trainer: L.Trainer, console: Console) -> None:
    try:
        stall_log(trainer).draw(folder.path)
        report = write_report(folder.path)
    except (RunError, OSError) as error:  # it must not hide the error that ended the run
        console.print(f"the report could not be written: {error}", highlight=False)
        return
    if run.get("accuracy") is not None:
        console.print(f"{run['accuracy_on']} accuracy {run['accuracy']:.2%}", highlight=False)
    if run.get("perplexity") is not None:
        said = f"{run['perplexity_on']} perplexity {run['perplexity']:.2f} a token"
        console.print(f"{said} (exp of the mean loss)", highlight=False)
    console.print(f"report: {report}", highlight=False)


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
    logging.getLogger("perfect").setLevel(logging.INFO)
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # Lightning 2.6 under torch 2.15 warns of its own code, which users cannot change.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)`")
    # A run may have no hold-out, and --check says so.
    warnings.filterwarnings("ignore", message="You defined a `validation_step` but have no")


if __name__ == "__main__":
    sys.exit(main())
