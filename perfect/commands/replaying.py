"""Trains a run again in one process: from a swarm's logs, or from a checkpoint to a step."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rich.console import Console
from torch import Tensor

from offload.sizes import format_count
from perfect.assembly.berth import Berth, StopWhen, berth_alone, berth_in_replay
from perfect.assembly.data import Data, build_data
from perfect.assembly.own_class import named_classes
from perfect.assembly.phase_plan import build_phase_switch
from perfect.assembly.run import build_module, build_trainer
from perfect.callbacks.phase_switch import PhaseSwitch
from perfect.config.schema import (
    CheckpointConfig,
    OffloadConfig,
    PlateauSwitch,
    RunConfig,
    dump_config,
)
from perfect.config.yaml_reader import read_config
from perfect.errors import RunError
from perfect.runs.folder import RunFolder
from perfect.runs.record import RunLog
from trainers import SaveStep
from trainers.elastic.errors import LogDamaged, ReplayDiffers
from trainers.elastic.peer.replay_strategy import ReplayStrategy
from trainers.read_checkpoint import going_on_from, read_checkpoint

NEVER = 1 << 60


def replay(runs: Sequence[Path], console: Console, *, trust: bool = False) -> str:
    """Return what is equal. Raise `ReplayDiffers` with the first step that is not. `trust`: import
    the classes that the configuration names, which runs their code."""
    logs = [log for run in runs for log in _logs_of(run)]
    config = trusted_config(runs[0], trust=trust)
    budget = None if config.offload is None else config.offload.budget
    strategy = ReplayStrategy(logs, budget=budget)
    if not strategy.history.steps:
        raise LogDamaged(
            f"the logs of {', '.join(map(str, runs))} do not reach back to the first step: give the"
            " folders of peers that were there, too"
        )
    finals = {
        final: read_checkpoint(final, "state_dict", dict)
        for final in (run / "final.ckpt" for run in runs)
        if final.exists()
    }
    with tempfile.TemporaryDirectory(prefix="perfect-replay-") as scratch:
        module, ended = _train(config, berth_in_replay(console, strategy), Path(scratch))
    compared = f"equal: {format_count(strategy.replayed.compared, 'step')}"
    if not ended or not finals:
        return compared
    mine = module.state_dict()
    for final, theirs in finals.items():
        for name in {**mine, **theirs}:
            if not _is_equal(mine.get(name), theirs.get(name)):
                raise ReplayDiffers(f"{name} in {final} differs from the weights of the replay")
    return f"{compared}, and the final weights"


def trusted_config(run: Path, *, trust: bool) -> RunConfig:
    """Return the configuration of a run. Raise `RunError` if it names classes, and `trust` is not
    given: their import runs code."""
    config = read_config(run / "config.yaml")[0]
    named = ", ".join(named_classes(dump_config(config)))
    if named and not trust:
        raise RunError(
            f"{run / 'config.yaml'} names {named}, whose import may run any code; give --trust"
            " if you trust who wrote the folder and the code"
        )
    return config


def _logs_of(run: Path) -> list[Path]:
    logs = sorted((run / "elastic").glob("*.jsonl"))
    if not logs or not (run / "config.yaml").exists():
        raise LogDamaged(
            f"{run} is no run folder of a peer: it has no config.yaml and elastic/*.jsonl"
        )
    return logs


@contextmanager
def _build_again(
    config: RunConfig, berth: Berth, scratch: Path, **changed: Any
) -> Iterator[tuple[L.Trainer, L.LightningModule, PhaseSwitch, Data]]:
    """Build a run for this block that keeps nothing, with some sections changed."""
    loader = config.loader.model_copy(update={"cache": None})  # it would write a folder
    kept = {"loggers": [], "checkpoint": CheckpointConfig(every_steps=NEVER), "loader": loader}
    config = config.model_copy(update=kept | changed)
    L.seed_everything(config.seed, verbose=False)
    data = build_data(config)
    try:
        module = build_module(config, data.num_classes)
        switch = build_phase_switch(config)
        log = RunLog(scratch, berth.clock)
        trainer = build_trainer(config, scratch, switch, log, berth, data)
        if not isinstance(config.switch, PlateauSwitch):
            trainer.limit_val_batches = 0  # Only a plateau depends on what validation sees.
        yield trainer, module, switch, data
    finally:
        data.close()


def _train(config: RunConfig, berth: Berth, scratch: Path) -> tuple[L.LightningModule, bool]:
    """Return the trained module, and whether all phases have ended."""
    with _build_again(config, berth, scratch, elastic=None) as (trainer, module, switch, data):
        trainer.fit(module, **data.fit_arguments())
        with switch.averaged(module):
            state = {name: value.clone() for name, value in module.state_dict().items()}
        module.load_state_dict(state)
        return module, switch.policy.finished


def _is_equal(ours: Any, theirs: Any) -> bool:
    """Whether these are equal tensors. `torch.equal` raises if they are of different kinds."""
    if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor):
        return False
    kinds = [(tensor.dtype, tensor.layout, tensor.device.type) for tensor in (ours.cpu(), theirs)]
    return kinds[0] == kinds[1] and torch.equal(ours.cpu(), theirs)


def save_step(
    run: Path, step: int, out: Path, console: Console, *, data: bool = True, trust: bool = False
) -> str:
    """Return what was saved. `data`: as of `SaveStep`. `trust`: import the classes that the
    configuration names, which runs their code."""
    folder = RunFolder(run)
    if not folder.config.exists():
        raise RunError(f"{run} is no run folder: it has no config.yaml")
    config = trusted_config(run, trust=trust)
    if config.elastic is not None or config.trainer.devices > 1:
        raise RunError(
            f"{run} trained on several devices, and a step of one device is saved: of a swarm,"
            " perfect-replay trains the steps again"
        )
    saver = SaveStep(out, step, data=data)
    with tempfile.TemporaryDirectory(prefix="perfect-step-") as scratch:
        begun, ended = _train_to(config, folder, saver, Path(scratch), console)
    if not saver.written:
        raise RunError(f"{run} has no step {step}: it ends after step {ended}")
    return f"saved step {step} of {run} to {out}, after training from step {begun}"


def _train_to(
    config: RunConfig, folder: RunFolder, saver: SaveStep, scratch: Path, console: Console
) -> tuple[int, int]:
    """Return the steps that the run had made before and after it trained."""
    known = folder.checkpoint_step()
    begun = known if known is not None and known < saver.step else 0
    checkpoint = folder.checkpoint if begun else None
    offload, berth = config.offload or OffloadConfig(), berth_alone(console)
    with _build_again(config, berth, scratch, offload=offload) as (trainer, module, _, data):
        stop = StopWhen(lambda _: saver.written)
        trainer.callbacks += [saver, stop]  # pyright: ignore[reportAttributeAccessIssue]
        with going_on_from(checkpoint, trainer):
            trainer.fit(module, **data.fit_arguments(), ckpt_path=checkpoint, weights_only=True)
        return begun, trainer.global_step
