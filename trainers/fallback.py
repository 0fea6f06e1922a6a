"""Why a run cannot be planned. Such a run is plain Lightning's, or it is refused: never half ours.

A hook between the parts of a step (between backward and the update, say) cannot be called where
Lightning calls it: the parts are tasks of one graph, which run in any order that keeps the bits.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities.model_helpers import is_overridden

from offload import CaptureError, OffloadError
from offload.tracing import is_foreign

MODULE_HOOKS = (
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "clip_gradients",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
CALLBACK_HOOKS = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
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
            yield f"{type(module).__name__} overrides {hook} ({_where(module, hook)})"
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        for hook in CALLBACK_HOOKS:
            if is_overridden(hook, callback, L.Callback):
                yield f"callback {type(callback).__name__} has {hook} ({_where(callback, hook)})"
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
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        yield "training_step takes the loader's iterator (dataloader_iter)"
    for name, p in module.named_parameters():
        if getattr(p, "_backward_hooks", None):
            yield f"{name} has a gradient hook (register_hook), which a planned step does not call"
    fused = any(getattr(o, "_step_supports_amp_scaling", False) for o in trainer.optimizers)
    if trainer.gradient_clip_val and isinstance(plugin, MixedPrecision) and fused:
        yield "Lightning clips no gradients for a fused optimizer in mixed precision"


def _has_batch_norm(module: torch.nn.Module) -> bool:
    return any(isinstance(part, torch.nn.modules.batchnorm._BatchNorm) for part in module.modules())


def _where(thing: Any, method: str) -> str:
    function = getattr(
        getattr(type(thing), method, None), "__wrapped__", getattr(type(thing), method)
    )
    try:
        file, line = inspect.getsourcefile(function), inspect.getsourcelines(function)[1]
    except (OSError, TypeError):
        return f"{type(thing).__module__}.{type(thing).__qualname__}.{method}"
    return f"{file}:{line}"


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
