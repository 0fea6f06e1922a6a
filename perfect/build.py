"""Configuration -> objects. The only place that branches on what a configuration says.

    RunConfig -> Data (train, hold-out, test) -> ReuseLoader, phases, task -> Lightning Trainer

Problems that only the data can show (a batch larger than the set, say) are BuildErrors naming the
key they come from, so that train.py reports them with the file's line.
"""

import importlib
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import lightning as L
import numpy as np
import torch
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from torch.utils.data import DataLoader, Subset

from loaders import LoaderError, ReuseLoader
from loaders.augment import Augmentation, Chain, Cutout, Draws, Flip, PadCrop, RandomResizedCrop
from loaders.reuse import batches_per_pass
from loaders.sources import PictureArrays, PictureFiles, cifar10, picture_folder
from perfect.callback import PhaseSwitch
from perfect.checkpoint import AtomicCheckpointIO, FiniteLoss, RunCheckpoint
from perfect.config import (
    AugmentConfig,
    BudgetSwitch,
    CutoutConfig,
    FlipConfig,
    PadCropConfig,
    PhaseConfig,
    PlateauSwitch,
    RunConfig,
    ScheduleConfig,
)
from perfect.errors import BuildError, PhaseError
from perfect.models import build_model
from perfect.phases import Phase, budget_split, check_phases
from perfect.plateau import PlateauRule
from perfect.progress import RunProgress
from perfect.record import RunLog
from perfect.schedule import Schedule
from perfect.tasks import ClassificationTask, OptimizerSpec

CIFAR10_MEAN = (125.3, 123.0, 113.9)
CIFAR10_STD = (63.0, 62.1, 66.7)

LOG_EVERY_STEPS = 10

EVALUATION_IN_MEMORY = 512 << 20
"""Hold-out and test pictures up to so many bytes are decoded once and kept."""


@dataclass(frozen=True, slots=True)
class Data:
    """What a run learns from and is judged by."""

    train: ReuseLoader
    holdout: ReuseLoader | None
    test: ReuseLoader | None
    num_classes: int | None
    datamodule: L.LightningDataModule | None = None


# ---- data ---------------------------------------------------------------------------------------


def build_data(config: RunConfig) -> Data:
    if config.data.class_path is not None:
        return _own_data(config)
    root = Path(config.data.root)
    try:
        if config.data.name == "cifar10":
            train, test = cifar10(root, train=True), cifar10(root, train=False)
        else:
            size = config.data.picture_size or 0
            train = picture_folder(root / "train", size)
            test = picture_folder(root / "val", size)
            if test.classes != train.classes:
                odd = sorted(set(test.classes) ^ set(train.classes))
                raise LoaderError(
                    f"train and val under {root} hold different classes ({', '.join(odd[:5])}):"
                    " give both the same folders"
                )
    except LoaderError as error:
        raise BuildError("data.root", str(error)) from error
    learned, held = split_holdout(train.labels, config.data.holdout, config.seed)
    if config.data.train_samples is not None:
        if config.data.train_samples > len(learned):
            raise BuildError(
                "data.train_samples",
                f"{config.data.train_samples} asked for, {len(learned)} are there",
            )
        learned = split_holdout(
            np.asarray(train.labels)[learned], config.data.train_samples, config.seed
        )[1]
        learned = np.sort(learned)
    pixels = 32 if config.data.name == "cifar10" else config.data.picture_size or 0
    return Data(
        train=_train_loader(config, Subset(cast(Any, train), learned.tolist())),
        holdout=_evaluation_loader(config, train, held.tolist(), pixels) if len(held) else None,
        test=_evaluation_loader(config, test, range(len(test)), pixels),
        num_classes=len(train.classes),
    )


def split_holdout(
    labels: Sequence[int] | np.ndarray, holdout: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Ids to train on and ids held out, the latter from every class alike."""
    labels = np.asarray(labels)
    if holdout >= len(labels):
        raise BuildError(
            "data.holdout", f"{holdout} of {len(labels)} training samples would leave none to learn"
        )
    order = np.random.default_rng(np.random.SeedSequence((seed, 7))).permutation(len(labels))
    # Rank of each sample within its class, in the shuffled order: take the lowest ranks.
    rank = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        members = order[labels[order] == label]
        rank[members] = np.arange(len(members))
    by_rank = order[np.argsort(rank[order], kind="stable")]
    return np.sort(by_rank[holdout:]), np.sort(by_rank[:holdout])


def _train_loader(config: RunConfig, dataset: Any) -> ReuseLoader:
    first = config.phases[0]
    sizes = [(config.loader.batch_size, "loader.batch_size")]
    sizes += [(p.batch_size or 0, f"phases.{n}.batch_size") for n, p in enumerate(config.phases)]
    for size, key in sizes:
        if size > len(dataset):
            raise BuildError(
                key, f"{size} is larger than the training set ({len(dataset)} samples): lower it"
            )
    return ReuseLoader(
        dataset,
        batch_size=config.loader.batch_size,
        reuse=first.reuse,
        buffer_batches=config.loader.buffer_batches,
        reaugment=first.reaugment,
        augment=build_augmentation(config.augment),
        mode=config.loader.mode,
        workers=config.loader.workers,
        drop_last=config.loader.drop_last,
        seed=config.seed,
        pin_memory=torch.cuda.is_available() and config.trainer.accelerator != "cpu",
    )


def _evaluation_loader(
    config: RunConfig, dataset: PictureArrays | PictureFiles, ids: Sequence[int], pixels: int
) -> ReuseLoader:
    picked: Any = Subset(cast(Any, dataset), list(ids))
    if isinstance(dataset, PictureFiles) and len(ids) * pixels * pixels * 3 <= EVALUATION_IN_MEMORY:
        picked = Remembered(picked)
    return ReuseLoader(
        picked,
        batch_size=min(config.loader.batch_size, len(ids)),
        reuse=1,
        augment=_centre_crop(config.augment),
        shuffle=False,
        workers=config.loader.workers,
        seed=config.seed,
    )


class Remembered:
    """A data set that decodes each sample once and keeps it: for small evaluation sets."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._kept: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        if index not in self._kept:
            self._kept[index] = self.dataset[index]
        return self._kept[index]


def build_augmentation(configs: Sequence[AugmentConfig]) -> Augmentation | None:
    steps: list[Augmentation] = []
    for config in configs:
        if isinstance(config, PadCropConfig):
            steps.append(PadCrop(config.padding))
        elif isinstance(config, FlipConfig):
            steps.append(Flip(config.p))
        elif isinstance(config, CutoutConfig):
            steps.append(Cutout(config.size))
        else:
            steps.append(RandomResizedCrop(config.size, config.min_scale))
    return Chain(steps) if steps else None


def _centre_crop(configs: Sequence[AugmentConfig]) -> Augmentation | None:
    """Evaluation sees the middle, at the size that training crops to."""
    sizes = [c.size for c in configs if c.name == "random_resized_crop"]
    if not sizes:
        return None
    size = sizes[-1]

    def crop(images: torch.Tensor, draws: Draws) -> torch.Tensor:  # noqa: ARG001
        top, left = (images.shape[-2] - size) // 2, (images.shape[-1] - size) // 2
        return images[..., top : top + size, left : left + size]

    return crop


def _own_data(config: RunConfig) -> Data:
    made = load_class(config.data.class_path or "", "data.class_path")
    datamodule = made(**config.data.init_args)
    if not isinstance(datamodule, L.LightningDataModule):
        raise BuildError(
            "data.class_path", f"{config.data.class_path} is no lightning.LightningDataModule"
        )
    datamodule.prepare_data()
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    if isinstance(loader, DataLoader):
        if loader.collate_fn is not torch.utils.data.default_collate:
            raise BuildError(
                "data.class_path",
                "its train DataLoader has a collate_fn of its own, which ReuseLoader would not"
                " call: return a ReuseLoader from train_dataloader()",
            )
        loader = _train_loader(config, loader.dataset)
    elif not isinstance(loader, ReuseLoader):
        raise BuildError(
            "data.class_path",
            f"train_dataloader() gave a {type(loader).__name__}: return a DataLoader over a"
            " map-style data set, or a ReuseLoader",
        )
    elif "loader" in config.model_fields_set:
        raise BuildError("loader", "no effect: the data module brings its own ReuseLoader")
    datamodule.train_dataloader = lambda: loader  # the hook is answered once, here
    return Data(loader, None, None, None, datamodule)


# ---- phases -------------------------------------------------------------------------------------


def build_phases(config: RunConfig) -> tuple[list[Phase], PlateauRule | None]:
    """The phases with their lengths, and the plateau rule if there is one."""
    phases = [build_phase(p) for p in config.phases]
    switch = config.switch
    if isinstance(switch, BudgetSwitch | PlateauSwitch) and switch.total and switch.fresh_passes:
        phases = _budgeted(phases, switch.fresh_passes, switch.total)
    problems = check_phases(phases)
    if problems:
        raise BuildError("phases", "; ".join(problems))
    if not isinstance(switch, PlateauSwitch):
        return phases, None
    total = sum((p.passes or 0) * p.reuse for p in phases)
    rule = PlateauRule(
        window=switch.window or max(12, math.ceil(0.075 * total)),
        accuracy_slope=switch.accuracy_slope,
        loss_slope=switch.loss_slope,
        hits=switch.hits,
        not_before=switch.earliest * total,
    )
    if config.data.class_path is None and not config.data.holdout:
        raise BuildError(
            "data.holdout", "the plateau rule watches a hold-out: set some training samples aside"
        )
    return phases, rule


def _budgeted(phases: list[Phase], fresh: float, total: float) -> list[Phase]:
    if len(phases) != 2 or phases[0].reuse < 2 or phases[1].reuse != 1:
        raise BuildError(
            "switch", "a budget splits two phases, the first with reuse >= 2, the second with 1"
        )
    if any(p.passes is not None or p.steps is not None for p in phases):
        raise BuildError("phases", "passes and steps have no effect: the budget decides them")
    try:
        split = budget_split(fresh, total, phases[0].reuse)
    except PhaseError as error:
        raise BuildError("switch", str(error)) from error
    return [replace(phases[0], passes=split.pretrain), replace(phases[1], passes=split.finetune)]


def build_phase(config: PhaseConfig) -> Phase:
    return Phase(
        name=config.name,
        reuse=config.reuse,
        passes=config.passes,
        steps=config.steps,
        reaugment=config.reaugment,
        batch_size=config.batch_size,
        lr=build_schedule(config.lr) if config.lr else None,
        weight_decay=config.weight_decay,
        ema=config.ema,
        reset_optimizer=config.reset_optimizer,
    )


def build_schedule(config: ScheduleConfig) -> Schedule:
    begin, end = config.part
    return Schedule(config.kind, config.lr, config.final, config.warmup, config.ramp, (begin, end))


def build_phase_switch(config: RunConfig) -> PhaseSwitch:
    phases, rule = build_phases(config)
    monitor = config.switch.monitor if isinstance(config.switch, PlateauSwitch) else "val_accuracy"
    try:
        return PhaseSwitch(
            phases,
            plateau=rule,
            monitor=monitor,
            ema_decay=config.ema.decay,
            validate_every=config.trainer.validate_every,
        )
    except PhaseError as error:
        raise BuildError("phases", str(error)) from error


# ---- module and trainer -------------------------------------------------------------------------


def build_module(config: RunConfig, num_classes: int | None) -> L.LightningModule:
    if config.model.class_path is not None:
        module = load_class(config.model.class_path, "model.class_path")(**config.model.init_args)
        if not isinstance(module, L.LightningModule):
            raise BuildError(
                "model.class_path", f"{config.model.class_path} is no lightning.LightningModule"
            )
        return module
    classes = config.model.num_classes or num_classes
    if classes is None:
        raise BuildError("model.num_classes", "is needed: a data module does not tell")
    if num_classes is not None and classes < num_classes:
        raise BuildError("model.num_classes", f"{classes}, but the data has {num_classes} classes")
    spec = OptimizerSpec(**config.optimizer.model_dump())
    model = build_model(config.model.name or "", classes)
    if config.data.name == "cifar10":
        return ClassificationTask(
            model, spec, config.task.label_smoothing, CIFAR10_MEAN, CIFAR10_STD
        )
    return ClassificationTask(model, spec, config.task.label_smoothing)


def load_class(path: str, key: str) -> Callable[..., Any]:
    """`mypkg.module.Class`, importable from the folder the command runs in."""
    module, _, name = path.rpartition(".")
    if os.getcwd() not in sys.path:
        # perfect-train, unlike python -m, does not look here by itself. Last: nothing is shadowed.
        sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise BuildError(
            key, f"cannot import '{path}': {error}; give package.module.Class, importable from here"
        ) from error


def build_trainer(
    config: RunConfig,
    out: Path,
    switch: PhaseSwitch,
    run_log: RunLog,
    stop_asked: Callable[[], bool],
    data: Data,
) -> L.Trainer:
    if config.trainer.threads is not None:
        torch.set_num_threads(config.trainer.threads)
    loader = data.train
    shortest = min(
        batches_per_pass(
            len(loader.dataset), p.batch_size or loader.batch_size, p.reuse, loader.mode,
            loader.drop_last,
        )
        for p in switch.policy.phases
    )  # fmt: skip
    finite = FiniteLoss()
    saver = RunCheckpoint(out / "last.ckpt", config.checkpoint.every_steps, finite, stop_asked)
    return L.Trainer(
        accelerator=config.trainer.accelerator,
        devices=config.trainer.devices,
        strategy="ddp" if config.trainer.devices > 1 else "auto",
        precision=config.trainer.precision,
        callbacks=[switch, finite, RunProgress(switch, run_log), saver],
        plugins=[AtomicCheckpointIO()],
        logger=[run_log, *(_logger(name, out) for name in config.loggers)],
        max_epochs=-1,
        accumulate_grad_batches=config.trainer.accumulate,
        gradient_clip_val=config.trainer.gradient_clip,
        check_val_every_n_epoch=None,
        limit_val_batches=0 if data.holdout is None and data.datamodule is None else 1.0,
        num_sanity_val_steps=0,
        log_every_n_steps=min(LOG_EVERY_STEPS, shortest),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=out,
        use_distributed_sampler=False,
    )


def _logger(name: str, out: Path) -> Logger:
    if name == "csv":
        return CSVLogger(out, name="lightning_csv")
    if name == "tensorboard":
        return TensorBoardLogger(out, name="tensorboard", version="")
    return WandbLogger(name=out.name, save_dir=out, resume="allow", id=out.name)
