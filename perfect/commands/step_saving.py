"""Trains a run again from its newest checkpoint to a step, and saves that step."""

import tempfile
from pathlib import Path
from typing import Any

import lightning as L
from rich.console import Console

from perfect.assembly import (
    berth_alone,
    build_data,
    build_module,
    build_phase_switch,
    build_trainer,
)
from perfect.commands.replaying import NEVER, trusted_config
from perfect.config.schema import CheckpointConfig, OffloadConfig, PlateauSwitch, RunConfig
from perfect.errors import RunError
from perfect.runs.folder import RunFolder
from perfect.runs.record import RunLog
from trainers import SaveStep
from trainers.read_checkpoint import going_on_from


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
        begun, ended = _train(config, folder, saver, Path(scratch), console)
    if not saver.written:
        raise RunError(f"{run} has no step {step}: it ends after step {ended}")
    return f"saved step {step} of {run} to {out}, after training from step {begun}"


def _train(
    config: RunConfig, folder: RunFolder, saver: SaveStep, scratch: Path, console: Console
) -> tuple[int, int]:
    """Return the steps that the run had made before and after it trained."""
    without: dict[str, Any] = {
        "loggers": [],
        "checkpoint": CheckpointConfig(every_steps=NEVER),
        "offload": config.offload or OffloadConfig(),
        "loader": config.loader.model_copy(update={"cache": None}),  # it would write a folder
    }
    config = config.model_copy(update=without)
    known = folder.checkpoint_step()
    begun = known if known is not None and known < saver.step else 0
    checkpoint = folder.checkpoint if begun else None
    L.seed_everything(config.seed, verbose=False)
    data = build_data(config)
    try:
        module = build_module(config, data.num_classes)
        switch = build_phase_switch(config)
        berth = berth_alone(console)
        trainer = build_trainer(config, scratch, switch, RunLog(scratch), berth, data)
        trainer.callbacks += [saver, _StopAfter(saver)]  # pyright: ignore[reportAttributeAccessIssue]
        if not isinstance(config.switch, PlateauSwitch):
            trainer.limit_val_batches = 0  # Only a plateau depends on what validation sees.
        with going_on_from(checkpoint, trainer):
            trainer.fit(module, **data.fit_arguments(), ckpt_path=checkpoint, weights_only=True)
        return begun, trainer.global_step
    finally:
        data.close()


class _StopAfter(L.Callback):
    def __init__(self, saver: SaveStep) -> None:
        self._saver = saver

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if self._saver.written:
            trainer.should_stop = True
