"""What a swarm cannot train exactly, said before the first step."""

from typing import Any

import lightning as L
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.model_helpers import is_overridden

from trainers.elastic.errors import CannotBeElastic

HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device")
PER_LANE = "a swarm's batch is a share of a global step, and samples come lane by lane"


def check_run(trainer: L.Trainer, module: L.LightningModule) -> None:
    """Raise `CannotBeElastic` with all that is wrong, each with what to do."""
    wrong = [*_of_module(module), *_of_trainer(trainer)]
    if wrong:
        raise CannotBeElastic("; ".join(wrong))


def _of_module(module: L.LightningModule) -> list[str]:
    wrong: list[str] = []
    if not module.automatic_optimization:
        wrong.append(
            "manual optimization steps when it wants, and a swarm applies one total a step: use"
            " automatic optimization"
        )
    if len(module.trainer.optimizers) > 1:
        count = len(module.trainer.optimizers)
        wrong.append(f"there are {count} optimizers, and a swarm has one: configure one")
    for hook in HOOKS:
        if is_overridden(hook, module):
            wrong.append(f"{type(module).__name__}.{hook}: {PER_LANE}; use on_after_batch_transfer")
    for name, part in module.named_modules():
        if type(part).__name__ == "SyncBatchNorm":
            wrong.append(f"{name} is a SyncBatchNorm, which waits for other ranks: use BatchNorm")
    return wrong


def _of_trainer(trainer: L.Trainer) -> list[str]:
    wrong: list[str] = []
    if every := getattr(trainer, "reload_dataloaders_every_n_epochs", 0):
        wrong.append(
            f"reload_dataloaders_every_n_epochs={every}: a swarm deals one loader from the first"
            " step to the last; leave it at 0"
        )
    if trainer.accumulate_grad_batches != 1:
        wrong.append(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches}: lanes are micro-batches"
            " already; leave it at 1 and choose lanes="
        )
    every = trainer.val_check_interval
    if trainer.enable_validation and isinstance(every, int) and every == 1:
        wrong.append(
            "val_check_interval=1: no run goes on exactly right after a validation, so newcomers"
            " would never be let in; validate after every second batch, or less often"
        )
    plugin: Any = trainer.precision_plugin
    if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
        wrong.append(
            "precision 16-mixed scales gradients by what a peer has seen (GradScaler), so peers"
            " would differ: use bf16-mixed or 32-true"
        )
    return wrong
