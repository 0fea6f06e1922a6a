"""Reasons why a run cannot be planned. Such a run is trained eagerly as a whole, or refused.

The parts of a step are tasks of one graph and run in any order that keeps the bits, so code that
must run between two parts cannot be planned. Hooks that can be traced are allowed (hooks.py).
"""

import inspect
from collections.abc import Iterator

import lightning as L
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities.model_helpers import is_overridden

from offload import CaptureError, OffloadError
from offload.optimizer.updates import check_optimizer
from offload.program.frames import is_foreign
from offload.torch_seams import BatchNorm, is_fused
from trainers.offloading.tracing.hooks import hooks_of, unplannable, where

MODULE_HOOKS = (
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
)
PRECISION_METHODS = (
    "backward",
    "optimizer_step",
    "clip_gradients",
    "clip_grad_by_norm",
    "clip_grad_by_value",
    "pre_backward",
    "post_backward",
    "main_params",
)


def reason(trainer: L.Trainer, module: L.LightningModule, by_hand: bool = False) -> str:
    """Return why this run cannot be planned, with the user's line; empty if nothing is known
    against it. `by_hand`: steps that optimize by hand are planned here."""
    return next(_reasons(trainer, module, by_hand), "")


def _reasons(trainer: L.Trainer, module: L.LightningModule, by_hand: bool) -> Iterator[str]:
    if not module.automatic_optimization and not by_hand:
        yield f"{type(module).__name__} optimizes manually (automatic_optimization = False)"
    if len(trainer.optimizers) != 1 and not (by_hand and trainer.optimizers):
        yield f"there are {len(trainer.optimizers)} optimizers, and a plan has one"
    for optimizer in trainer.optimizers:
        # Said before the closure runs: an optimizer may call it several times, or not at all.
        try:
            check_optimizer(optimizer)
        except CaptureError as error:
            yield str(error)
    for hook in MODULE_HOOKS[:1] if by_hand else MODULE_HOOKS:
        if is_overridden(hook, module):
            yield f"{type(module).__name__} overrides {hook} ({where(module, hook)})"
    yield from unplannable(hooks_of(trainer, module), trainer, module)
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(callback, StochasticWeightAveraging) and _has_batch_norm(module):
            yield (
                "StochasticWeightAveraging updates BatchNorm's statistics in an extra epoch, whose"
                " optimizer steps use the gradients of the previous step, but a planned step leaves"
                " no gradients behind"
            )
    plugin = trainer.precision_plugin
    if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
        yield (
            "precision 16-mixed has a GradScaler, which reads the gradients in mid-step: use"
            " bf16-mixed"
        )
    for method in PRECISION_METHODS:
        known = {getattr(kind, method, None) for kind in (Precision, MixedPrecision)}
        if getattr(type(plugin), method, None) not in known:
            yield f"the precision plugin {type(plugin).__name__} has its own {method}"
    if torch.is_anomaly_enabled():
        yield "detect_anomaly=True reads the values of every gradient when it is computed"
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        yield "training_step takes the loader's iterator (dataloader_iter)"
    fused = any(is_fused(o) for o in trainer.optimizers)
    if trainer.gradient_clip_val and isinstance(plugin, MixedPrecision) and fused:
        yield (
            f"Lightning ignores gradient_clip_val={trainer.gradient_clip_val} for a fused optimizer"
            " in mixed precision"
        )


def _has_batch_norm(module: torch.nn.Module) -> bool:
    return any(isinstance(part, BatchNorm) for part in module.modules())


def user_error(error: CaptureError) -> BaseException | None:
    """Return the exception that the user's own code raised while it was traced, if it did: the user
    gets to see it unchanged."""
    cause = error.__cause__
    if cause is None or isinstance(cause, OffloadError):
        return None
    traceback = cause.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None or is_foreign(traceback.tb_frame.f_code.co_filename):
        return None
    return cause
