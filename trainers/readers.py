"""Who may read the weights between two training steps: where somebody may, no update waits.

    step 1 | on_train_batch_end .. on_train_batch_start | step 2        hooks: somebody's code

Lightning's own callbacks that read no weights there are known. One of yours may say so of itself:

    class Counting(L.Callback):
        reads_weights_between_steps = False

So may a module and a data module. What is read at the end of an epoch, for validation or for a
checkpoint, is not meant: before that everything is made whole (whole.py).
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

from trainers.hooks import Hook

SAYS = "reads_weights_between_steps"
HOOKS = ("on_train_batch_start", "on_train_batch_end")
DATA_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
MODULE_HOOKS = (
    "lr_scheduler_step",
    # Before the callbacks know of a validation.
    "on_validation_model_zero_grad",
    "on_validation_model_eval",
)
KNOWN = (
    DeviceStatsMonitor,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
DEEP, WIDE = 5, 100
"""How far it is looked for the module in what gives out the batches."""


class Readers:
    """Of one fit."""

    def __init__(self, module: L.LightningModule) -> None:
        self._module = module
        self._trainer = module.trainer
        self._datamodule: Any = getattr(module.trainer, "datamodule", None)
        self._data = ""
        self._callbacks: list[Any] | None = None
        self._hooks: list[Hook] = []

    def first(self) -> str:
        """One who may read weights now, with the line; empty: nobody. Asked before every step."""
        callbacks: list[Any] = self._trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        if self._callbacks != callbacks:
            self._callbacks = list(callbacks)
            self._hooks = list(_hooks(callbacks, self._module, self._datamodule))
            self._data = _holder(self._trainer, self._module)
        for hook in self._hooks:
            # It may be so in one phase of a run and not in another.
            if getattr(hook.owner, SAYS, True):
                return str(hook)
        return self._data


def _hooks(callbacks: Iterable[Any], module: Any, datamodule: Any) -> Iterator[Hook]:
    for callback in callbacks:
        # A class made from a known one may do anything.
        if type(callback) not in KNOWN:
            yield from (Hook(callback, name) for name in HOOKS if is_overridden(name, callback))
    for name in (*HOOKS, *DATA_HOOKS, *MODULE_HOOKS):
        if is_overridden(name, module):
            yield Hook(module, name)
    for name in DATA_HOOKS:
        if datamodule is not None and is_overridden(name, datamodule):
            yield Hook(datamodule, name)


def _holder(trainer: Any, module: torch.nn.Module) -> str:
    """What gives out the batches and has the weights at hand: it may be a player of games."""
    own = {id(p) for p in module.parameters()}
    loaders = trainer.fit_loop._combined_loader
    for loader in loaders.flattened if loaders is not None else ():
        if _reaches(loader, own):
            dataset = getattr(loader, "dataset", loader)
            return f"the data ({type(dataset).__name__}) has weights of the module at hand"
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
        cells: Any = getattr(thing, "__closure__", None) or ()
        found += [getattr(thing, "__self__", None), *map(_content, cells)]
    return found


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None
