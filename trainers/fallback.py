"""Why a run cannot be planned. Such a run is plain Lightning's, or it is refused: never half ours.

The parts of a step are tasks of one graph, which run in any order that keeps the bits: what is
done by hand between them cannot be done. Hooks that can be traced are no reason (hooks.py).
"""

import inspect
from collections.abc import Iterator

import lightning as L
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities.model_helpers import is_overridden

from offload import CaptureError, OffloadError
from offload.frames import is_foreign
from trainers.hooks import hooks_of, unplannable, where

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


def reason(trainer: L.Trainer, module: L.LightningModule) -> str:
    """Why this run cannot be planned, with the user's line; empty: it can, as far as one sees."""
    return next(_reasons(trainer, module), "")


def _reasons(trainer: L.Trainer, module: L.LightningModule) -> Iterator[str]:
    if not module.automatic_optimization:
        yield f"{type(module).__name__} optimizes by hand (automatic_optimization = False)"
    if len(trainer.optimizers) != 1:
        yield f"there are {len(trainer.optimizers)} optimizers"
    for hook in MODULE_HOOKS:
        if is_overridden(hook, module):
            yield f"{type(module).__name__} overrides {hook} ({where(module, hook)})"
    yield from unplannable(hooks_of(trainer, module), trainer, module)
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(callback, StochasticWeightAveraging) and _has_batch_norm(module):
            yield (
                "StochasticWeightAveraging makes an epoch for BatchNorm's statistics, with a step"
                " of the optimizer on the gradients of the step before, which are nowhere"
            )
    plugin = trainer.precision_plugin
    if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
        yield (
            "precision 16-mixed has a GradScaler, which looks at the gradients in mid-step: take"
            " bf16-mixed"
        )
    for method in PRECISION_METHODS:
        known = {getattr(kind, method, None) for kind in (Precision, MixedPrecision)}
        if getattr(type(plugin), method, None) not in known:
            yield f"the precision plugin {type(plugin).__name__} has its own {method}"
    if torch.is_anomaly_enabled():
        yield "detect_anomaly=True looks at the values of every gradient while it is made"
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        yield "training_step takes the loader's iterator (dataloader_iter)"
    fused = any(getattr(o, "_step_supports_amp_scaling", False) for o in trainer.optimizers)
    if trainer.gradient_clip_val and isinstance(plugin, MixedPrecision) and fused:
        yield "Lightning clips no gradients for a fused optimizer in mixed precision"


def _has_batch_norm(module: torch.nn.Module) -> bool:
    return any(isinstance(part, torch.nn.modules.batchnorm._BatchNorm) for part in module.modules())


def user_error(error: CaptureError) -> BaseException | None:
    """What the user's own line raised while it was traced: it is theirs to see as it is."""
    cause = error.__cause__
    if cause is None or isinstance(cause, OffloadError):
        return None
    traceback = cause.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None or is_foreign(traceback.tb_frame.f_code.co_filename):
        return None
    return cause
