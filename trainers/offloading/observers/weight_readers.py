"""Finds code that may read the weights between two training steps; then no update is deferred.

    step 1 | on_train_batch_end .. on_train_batch_start | step 2        hooks: a user's code

Lightning's own callbacks are known. A callback of yours can declare that it reads no weights there,
and so can a module and a data module:

    class Counting(L.Callback):
        reads_weights_between_steps = False

Reads at the end of an epoch, for validation or for a checkpoint do not count: before them all
deferred updates are run (steps/late_updates.py).
"""

from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.utilities.model_helpers import is_overridden

from trainers.lightning_seams import combined_loader
from trainers.offloading.tracing.hooks import Hook

SAYS = "reads_weights_between_steps"
HOOKS = ("on_train_batch_start", "on_train_batch_end")
DATA_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
MODULE_HOOKS = (
    "lr_scheduler_step",
    # These are called before the callbacks know of a validation.
    "on_validation_model_zero_grad",
    "on_validation_model_eval",
)
KNOWN = (LearningRateMonitor, ModelCheckpoint, RichProgressBar, Timer, TQDMProgressBar)
"""What these callbacks read changes only at the end of an optimizer step."""
READ_NO_WEIGHTS = (*KNOWN, DeviceStatsMonitor, ThroughputMonitor)
DEEP, WIDE = 5, 100
"""Weights are searched in the loaders down to this depth, in containers of at most this size."""


class WeightReaders:
    """Finds readers of the weights in one fit."""

    def __init__(self, module: L.LightningModule) -> None:
        self._module = module
        self._trainer = module.trainer
        self._datamodule: Any = getattr(module.trainer, "datamodule", None)
        self._data = ""
        self._callbacks: list[Any] | None = None
        self._hooks: list[Hook] = []

    def first(self) -> str:
        """Name one hook or data set that may read weights now, with its line; empty if there is
        none. This is called before every step."""
        callbacks: list[Any] = self._trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        if self._callbacks != callbacks:
            self._callbacks = list(callbacks)
            self._hooks = list(_hooks(callbacks, self._module, self._datamodule))
            self._data = _holder(self._trainer, self._module)
        for hook in self._hooks:
            # The declaration may differ from phase to phase of a run.
            if getattr(hook.owner, SAYS, True):
                return str(hook)
        return self._data


def _hooks(callbacks: Iterable[Any], module: Any, datamodule: Any) -> Iterator[Hook]:
    for callback in callbacks:
        # A subclass of a known class may do anything.
        if type(callback) not in READ_NO_WEIGHTS:
            yield from (Hook(callback, name) for name in HOOKS if is_overridden(name, callback))
    for name in (*HOOKS, *DATA_HOOKS, *MODULE_HOOKS):
        if is_overridden(name, module):
            yield Hook(module, name)
    for name in DATA_HOOKS:
        if datamodule is not None and is_overridden(name, datamodule):
            yield Hook(datamodule, name)


def _holder(trainer: Any, module: torch.nn.Module) -> str:
    """Name a data set that holds weights of the module: a reinforcement learner's actor, say."""
    own = {id(p) for p in module.parameters()}
    loaders = combined_loader(trainer)
    for loader in loaders.flattened if loaders is not None else ():
        if _reaches(loader, own):
            dataset = getattr(loader, "dataset", loader)
            return f"the data set ({type(dataset).__name__}) holds weights of the module"
    return ""


def _reaches(thing: Any, own: set[int]) -> bool:
    level, seen = [thing], set[int]()
    for _ in range(DEEP):
        following: list[Any] = []
        for one in level:
            if id(one) in seen:
                continue
            seen.add(id(one))
            if isinstance(one, torch.Tensor) and id(one) in own:
                return True
            if isinstance(one, torch.nn.Module) and any(id(p) in own for p in one.parameters()):
                return True
            following += _inside(one)
        level = following
    return False


def _inside(thing: Any) -> list[Any]:
    if isinstance(thing, type | ModuleType):
        return []
    found = list(getattr(thing, "__dict__", {}).values())
    if isinstance(thing, list | tuple | set | dict) and len(thing) <= WIDE:
        found += thing.values() if isinstance(thing, dict) else thing
    if callable(thing):
        cells: Any = getattr(thing, "__closure__", None)
        cells = cells if type(cells) is tuple else ()  # a mock has any attribute
        found += [getattr(thing, "__self__", None), *map(_content, cells)]
    return found


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return None


def onlooker(trainer: L.Trainer, module: L.LightningModule) -> str:
    """Name the first hook that may observe a run between two micro-batches, with its line; empty if
    there is none. Where there is one, no micro-batch is deferred: it would find another loss,
    other logged values and other weights than plain Lightning's."""
    callbacks: list[L.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    for callback in callbacks:
        for name in HOOKS:
            # A subclass of a known class may do anything.
            if type(callback) not in KNOWN and is_overridden(name, callback, L.Callback):
                return str(Hook(callback, name))
    for name in HOOKS:
        if is_overridden(name, module):
            return str(Hook(module, name))
    return ""
