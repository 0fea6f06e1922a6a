"""Builds the module and the Trainer from config.model, .task, .optimizer, .trainer and .loggers."""

import logging
import os
from importlib.util import find_spec
from pathlib import Path

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import CPUAccelerator, MPSAccelerator
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

from loaders.order.keyed_permutation import samples_per_rank
from loaders.order.reuse import batches_per_pass
from offload import OffloadError
from offload.running.drivers.cuda import check_cuda
from perfect.assembly.berth import Berth, check_device
from perfect.assembly.data import Data
from perfect.assembly.own_class import construct_own
from perfect.callbacks.phase_switch import PhaseSwitch
from perfect.config.schema import LANGUAGE_MODEL_NAMES, RunConfig
from perfect.errors import BuildError
from perfect.models import build_language_model, build_model
from perfect.models.classification import ClassificationTask, LanguageTask
from perfect.models.lora import add_lora
from perfect.models.pretrained import WeightsError, load_pretrained
from perfect.runs.checkpoint import FiniteLoss, RunCheckpoint
from perfect.runs.progress import RunProgress
from perfect.runs.record import RunLog
from perfect.runs.stall_log import StallLog
from perfect.runs.swarm_figures import SwarmFigures
from trainers.atomic_checkpoint import AtomicCheckpointIO

log = logging.getLogger(__name__)

CIFAR10_MEAN = (125.3, 123.0, 113.9)
CIFAR10_STD = (63.0, 62.1, 66.7)

LOG_EVERY_STEPS = 10


def build_module(config: RunConfig, num_classes: int | None) -> L.LightningModule:
    if config.model.class_path is not None:
        return construct_own(config.model, "model", L.LightningModule)
    classes = config.model.num_classes or num_classes
    if classes is None:
        raise BuildError(
            "model.num_classes", "is missing: your data module does not have it, so give it here"
        )
    if num_classes is not None and classes < num_classes:
        raise BuildError(
            "model.num_classes",
            f"is {classes}, but the data has {num_classes} classes: give {num_classes} or more, or"
            " leave it out",
        )
    if config.model.name in LANGUAGE_MODEL_NAMES:
        return _language_module(config, classes)
    model = build_model(config.model.name or "", classes)
    if config.data.name == "cifar10":
        return ClassificationTask(
            model, config.optimizer, config.task.label_smoothing, CIFAR10_MEAN, CIFAR10_STD
        )
    return ClassificationTask(model, config.optimizer, config.task.label_smoothing)


def _language_module(config: RunConfig, vocabulary: int) -> L.LightningModule:
    asked = config.model
    model = build_language_model(asked.name or "", vocabulary, asked.dropout)
    if asked.weights is not None:
        try:
            load_pretrained(model, Path(asked.weights))
        except WeightsError as error:
            raise BuildError("model.weights", str(error)) from error
    if asked.lora is not None:
        add_lora(model, model.adapted, asked.lora.rank, asked.lora.alpha)
    padded = config.data.name == "lines"
    return LanguageTask(model, config.optimizer, config.task.label_smoothing, padded)


def build_trainer(
    config: RunConfig, out: Path, switch: PhaseSwitch, run_log: RunLog, berth: Berth, data: Data
) -> L.Trainer:
    _check_gpu(config)
    if config.trainer.threads is not None:
        torch.set_num_threads(config.trainer.threads)
    finite = FiniteLoss()
    saver = RunCheckpoint(
        out / "last.ckpt", config.checkpoint.every_steps, finite, berth.stop_requested
    )
    strategy = berth.strategy(config)
    progress = RunProgress(switch, run_log, berth.console, own_folder=berth.own_folder)
    stalls = StallLog(switch, berth.clock)
    of_a_swarm = [] if config.elastic is None else [SwarmFigures(run_log)]
    try:
        trainer = L.Trainer(
            **berth.device(config),
            strategy=strategy,
            precision=config.trainer.precision,
            callbacks=[switch, stalls, *of_a_swarm, finite, progress, *berth.callbacks, saver],
            plugins=[AtomicCheckpointIO()],
            logger=[run_log, *(_logger(name, out) for name in config.loggers)],
            max_epochs=-1,
            accumulate_grad_batches=config.trainer.accumulate,
            gradient_clip_val=config.trainer.gradient_clip,
            check_val_every_n_epoch=None,
            limit_val_batches=0 if data.holdout is None and data.datamodule is None else 1.0,
            num_sanity_val_steps=0,
            log_every_n_steps=min(LOG_EVERY_STEPS, _shortest_pass(config, switch, data)),
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=out,
            use_distributed_sampler=False,
        )
    except MisconfigurationException as error:
        raise BuildError("trainer", str(error)) from error
    check_device(trainer)
    ranks, cores = trainer.world_size, os.cpu_count() or 1
    if isinstance(trainer.accelerator, CPUAccelerator) and ranks > cores:
        log.warning(
            "trainer.devices: %d processes share the %d cores of this machine, so a step takes"
            " longer than on %d devices",
            ranks, cores, cores,
        )  # fmt: skip
    return trainer


def _check_gpu(config: RunConfig) -> None:
    """Say why no GPU can be used. Lightning would only say that there is none."""
    if config.trainer.accelerator != "gpu" or MPSAccelerator.is_available():
        return
    try:
        check_cuda(torch.device("cuda", 0))
    except OffloadError as error:
        raise BuildError("trainer.accelerator", str(error)) from error


def _shortest_pass(config: RunConfig, switch: PhaseSwitch, data: Data) -> int:
    loader = data.train
    samples = samples_per_rank(len(loader.dataset), config.trainer.devices)
    return min(
        min(
            p.steps or LOG_EVERY_STEPS,
            batches_per_pass(
                samples, p.batch_size or loader.batch_size, p.reuse, loader.mode, loader.drop_last
            ),
        )
        for p in switch.policy.phases
    )


def _logger(name: str, out: Path) -> Logger:
    if name != "csv" and find_spec(name) is None:
        raise BuildError("loggers", f"'{name}' is not installed: pip install {name}")
    if name == "csv":
        return CSVLogger(out, name="lightning_csv")
    if name == "tensorboard":
        return TensorBoardLogger(out, name="tensorboard", version="")
    return WandbLogger(name=out.name, save_dir=out, resume="allow", id=out.name)
