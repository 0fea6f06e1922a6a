"""Trains one run from YAML to report, alone, as a peer of a swarm, or as a job of a fleet.

open folder -> build -> fit (resumes from a checkpoint) -> judge -> report
"""

import logging
from contextlib import ExitStack, nullcontext
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.model_helpers import is_overridden
from rich.console import Console

from loaders import LoaderError
from offload import DeviceLost, OffloadError
from perfect.assembly.berth import Berth, berth_in_swarm, blamed, watched
from perfect.assembly.data import Data, build_data
from perfect.assembly.phase_plan import build_phase_switch
from perfect.assembly.run import build_module, build_trainer
from perfect.callbacks.phase_switch import PhaseSwitch
from perfect.command_line import print_plain, show_traceback
from perfect.config.schema import RunConfig, dump_config
from perfect.errors import FolderError, Interrupted, LossNotFinite, NotSaved, PhaseError, RunError
from perfect.report.report import write_report
from perfect.report.words import accuracy
from perfect.runs.folder import RunFolder
from perfect.runs.record import RunLog, describe_run, measured
from perfect.runs.stall_log import stall_log
from perfect.runs.swarm_figures import gloo_apart, swarm_table
from trainers.atomic_checkpoint import written
from trainers.elastic.errors import ElasticError, Expelled
from trainers.fleet.jobs.job_turns import JobLeft
from trainers.folder_lock import hold_folder
from trainers.read_checkpoint import CheckpointRefused, going_on_from

log = logging.getLogger(__name__)

MAX_REJOINS = 20


def train_as_peer(
    config: RunConfig, folder: RunFolder, console: Console, join: str, name: str
) -> int:
    """Train with a swarm to the end of the run. A peer that is expelled joins again."""
    for _ in range(MAX_REJOINS):
        try:
            return train(config, folder, berth_in_swarm(console, folder, join, name))
        except Expelled as error:
            print_plain(console, f"expelled: {error}; this peer joins again")
    print_plain(console, f"this peer was expelled {MAX_REJOINS} times, and gives up", style="red")
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
        print_plain(console, f"stopped at once; {_how_to_continue(folder)}")
        return 130
    except OffloadError as error:
        show_traceback()
        print_plain(errors, str(error), style="red")
        if isinstance(error, DeviceLost):
            print_plain(errors, _how_to_continue(folder))
        return 1
    except NotSaved as error:
        print_plain(errors, f"{error}; {_how_to_continue(folder)}", style="red")
        return 1
    except Expelled:
        raise
    except (LossNotFinite, CheckpointRefused, LoaderError, PhaseError, ElasticError) as error:
        show_traceback()
        print_plain(errors, "; ".join([str(error), *getattr(error, "__notes__", [])]), style="red")
        return 1
    return 0


def _how_to_continue(folder: RunFolder) -> str:
    """Say what the same command does after an end at once."""
    step = folder.checkpoint_step()
    if step is None:
        return "there is no checkpoint yet: the same command begins anew"
    return f"the same command resumes from the last checkpoint: {folder.checkpoint}, step {step}"


def train_run(config: RunConfig, folder: RunFolder, berth: Berth) -> None:
    """Train from the last checkpoint, or from the beginning, to the end of the run. Raise what ends
    it before; the records of the run are written in any case."""
    plain = dump_config(config)
    folder.open(plain)
    L.seed_everything(config.seed, verbose=False)
    log.info("looking at the data: %s", config.data.class_path or config.data.root)
    data = build_data(config)
    module = build_module(config, data.num_classes)
    switch = build_phase_switch(config)
    run_log = RunLog(folder.path, berth.clock, own_folder=berth.own_folder)
    trainer = build_trainer(config, folder.path, switch, run_log, berth, data)
    resumed_step = folder.checkpoint_step() if berth.loads_checkpoint else None
    ckpt = None if resumed_step is None else folder.checkpoint
    stack = ExitStack()
    try:
        _hold_folder(folder, stack)
        if resumed_step is not None:
            run_log.resume(resumed_step)
            message = f"resuming {folder.path} after step {resumed_step}"
            berth.console.print(message, highlight=False)
        folder.begin(plain)
        run = describe_run(
            name=folder.path.name,
            seed=config.seed,
            config=plain,
            chosen=config.model_dump(mode="json", exclude_defaults=True),
            resumed_at=folder.resumed_at(resumed_step),
        )
        folder.write(run)
    except OSError as error:
        stack.close()
        raise FolderError(
            f"{folder.path} cannot be written ({error}): free some space, or give another --out"
        ) from error
    status = "failed"
    try:
        loaders = data.fit_arguments()
        if data.datamodule is None:
            loaders["train_dataloaders"] = berth.train_loader(data.train)
        in_swarm = config.elastic is not None
        apart = gloo_apart(folder.path / "stderr.log") if in_swarm else nullcontext()
        log.info("training begins: the first batch is decoded")
        with watched(trainer), apart, going_on_from(ckpt, trainer):
            trainer.fit(module, **loaders, ckpt_path=ckpt, weights_only=True)
            run |= measured(switch, run_log, trainer) | swarm_table(trainer)
            with switch.averaged(module):
                saved = written(trainer, folder.final, weights_only=True)
            log.info("measuring the accuracy of the final weights")
            run |= judge(trainer, module, data, switch)
        if not saved:
            raise NotSaved(f"{folder.final} could not be written: free some space")
        status = "completed"
    except (Interrupted, JobLeft, KeyboardInterrupt, SystemExit):
        status = "stopped" if berth.stopped() else "interrupted"
        raise
    except OffloadError as error:
        run["error"] = str(error)
        with blamed():
            raise
    except (LossNotFinite, NotSaved, LoaderError, PhaseError, ElasticError) as error:
        run["error"] = "; ".join([str(error), *getattr(error, "__notes__", [])])
        raise
    except BaseException as error:
        run["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        run_log.save()
        if status != "completed":
            run |= measured(switch, run_log, trainer) | swarm_table(trainer)
        if (kept := run["not_saved_since"]) is not None:
            message = "this run has not saved since step %d: free some space for %s"
            log.error(message, kept, folder.checkpoint)
        unwritten = _write_results(folder, run | {"status": status})
        _report(folder, run, trainer, berth.console)
        data.close()
        stack.close()
    if unwritten:
        raise NotSaved(unwritten)


def _hold_folder(folder: RunFolder, stack: ExitStack) -> None:
    """Make the folder this process's until the stack is closed. Other ranks share that one."""
    folder.path.mkdir(parents=True, exist_ok=True)
    if getattr(rank_zero_only, "rank", 0):
        return
    if not stack.enter_context(hold_folder(folder.path)):
        raise FolderError(
            f"another process trains in {folder.path}: wait for its end, end it with Ctrl-C, or"
            " give another --out"
        )


def _write_results(folder: RunFolder, run: dict[str, Any]) -> str | None:
    """Write run.json. Return why it could not be written: that must not hide another error."""
    try:
        folder.write(run)
    except OSError as error:
        unwritten = f"{folder.run} could not be written ({error}): free some space"
        log.error("%s", unwritten)
        return unwritten
    return None


@rank_zero_only
def _report(folder: RunFolder, run: dict[str, Any], trainer: L.Trainer, console: Console) -> None:
    log.info("drawing the report")
    try:
        stall_log(trainer).draw(folder.path)
        report = write_report(folder.path)
    except (RunError, OSError) as error:  # it must not hide the error that ended the run
        console.print(f"the report could not be written: {error}", highlight=False)
        return
    if run.get("accuracy") is not None:
        console.print(f"{run['accuracy_on']} accuracy {accuracy(run['accuracy'])}", highlight=False)
    if run.get("perplexity") is not None:
        figure = f"{run['perplexity_on']} perplexity {run['perplexity']:.2f} a token"
        console.print(f"{figure} (exp of the mean loss)", highlight=False)
    console.print(f"report: {report}", highlight=False)


def judge(
    trainer: L.Trainer, module: L.LightningModule, data: Data, switch: PhaseSwitch
) -> dict[str, Any]:
    """Measure a finished run with its final weights, on the test set if there is one, and on the
    hold-out otherwise. Return `accuracy`, `perplexity`, and the set each was measured on; None if
    not logged. Without a test_step its validation_step and the monitored metric are used."""
    datamodule = data.datamodule
    tests, validates = (is_overridden(f"{s}_step", module) for s in ("test", "validation"))
    if tests and data.test is not None:
        return _figures(trainer.test(module, data.test, verbose=False), "test_accuracy", "test")
    if tests and datamodule is not None and is_overridden("test_dataloader", datamodule):
        results = trainer.test(module, datamodule=datamodule, verbose=False)
        return _figures(results, "test_accuracy", "test")
    if validates and data.test is not None:
        return _figures(trainer.validate(module, data.test, verbose=False), switch.monitor, "test")
    if validates and datamodule is not None and is_overridden("val_dataloader", datamodule):
        results = trainer.validate(module, datamodule=datamodule, verbose=False)
        return _figures(results, switch.monitor, "holdout")
    return _figures([], "", "")


def _figures(results: Any, name: str, where: str) -> dict[str, Any]:
    seen = results[0] if results else {}
    accuracy = seen.get(name)
    perplexity = seen.get("test_perplexity", seen.get("val_perplexity"))
    return {
        "accuracy": accuracy,
        "accuracy_on": where if accuracy is not None else None,
        "perplexity": perplexity,
        "perplexity_on": where if perplexity is not None else None,
    }
