"""Every private name of Lightning that trainers and perfect use, and no other file has one.

Each name stands with one line: what it is, and why no public name will do. All were seen in
Lightning 2.6. They are attributes of Lightning's objects: where a version of Lightning has lost
one, its first use here raises an AttributeError that names it.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch

TESTED = "lightning>=2.5,<2.7"


def _missing(what: str) -> str:
    return (
        f"lightning {L.__version__}: {what}. trainers needs it (trainers/lightning_seams.py) and"
        f" was tested with {TESTED}: install such a version"
    )


def _attribute(thing: Any, name: str) -> Any:
    try:
        return getattr(thing, name)
    except AttributeError as error:
        raise AttributeError(_missing(str(error)), name=name, obj=thing) from None


def _swap(thing: Any, name: str, value: Any) -> Any:
    """Set an attribute that is there, and return what it was."""
    before = _attribute(thing, name)
    setattr(thing, name, value)
    return before


try:
    from lightning.fabric.utilities import device_dtype_mixin

    # What remembers `self.device`: LightningModule and Metric, but no attribute says so.
    DeviceHolder = device_dtype_mixin._DeviceDtypeModuleMixin
except (ImportError, AttributeError) as error:
    raise ImportError(_missing(str(error))) from error

# ---- modules ------------------------------------------------------------------------------------


def set_module_device(part: Any, device: torch.device) -> None:
    """What `self.device` says of a `DeviceHolder`. Publicly, only `to()` sets it, which moves."""
    _swap(part, "_device", device)


def before_batch_transfer(module: L.LightningModule, batch: Any) -> Any:
    """The batch after the user's `on_before_batch_transfer`, as the loop calls it."""
    return _attribute(module, "_on_before_batch_transfer")(batch, dataloader_idx=0)


# ---- what is logged -----------------------------------------------------------------------------


@contextmanager
def logging_as(module: L.LightningModule, hook: str) -> Iterator[None]:
    """Within it, `self.log` takes the module to be in this hook, which has been called before in
    this batch. Only the loop says so, publicly nobody can."""
    before = _swap(module, "_current_fx_name", hook)
    logger = _attribute(module.trainer, "_logger_connector")
    is_first = _swap(logger, "_first_loop_iter", False)  # where it is, means begin anew
    try:
        yield
    finally:
        _swap(module, "_current_fx_name", before)
        _swap(logger, "_first_loop_iter", is_first)


def log_for_batch(trainer: L.Trainer, batch: Any) -> None:
    """Have `self.log` weigh values by the samples of this batch, of which the loop has given more
    to it."""
    made = results(trainer.fit_loop.epoch_loop)
    made.batch, made.batch_size = batch, None


def should_update_logs(trainer: L.Trainer) -> bool:
    """Whether loggers are told of this step: `log_every_n_steps`, as the loop counts it."""
    return _attribute(trainer, "_logger_connector").should_update_logs


def results(loop: Any) -> Any:
    """What `self.log` has collected in a loop. `trainer.callback_metrics` is a copy."""
    return _attribute(loop, "_results")


def logged_step(trainer: L.Trainer) -> int:
    """The step that Lightning's own loggers are told: micro-batches do not count."""
    return _attribute(trainer.fit_loop.epoch_loop, "_batches_that_stepped")


# ---- the train loader ---------------------------------------------------------------------------


def data_source(trainer: L.Trainer) -> Any:
    """Who gives out the train loader: it can be asked before the loop does, and told to keep it."""
    return _attribute(trainer.fit_loop, "_data_source")


def combined_loader(trainer: L.Trainer) -> Any:
    """The train loaders as the loop has them; None before it has asked for them."""
    return _attribute(trainer.fit_loop, "_combined_loader")


def forget_loader(trainer: L.Trainer) -> None:
    """The loop reads a loader's length once. After this it does so again."""
    _swap(trainer.fit_loop, "_combined_loader", None)


def reload_epoch(trainer: L.Trainer) -> Any:
    """When the loop last asked for a loader: `reload_dataloaders_every_n_epochs` counts from it."""
    return _attribute(trainer.fit_loop, "_last_train_dl_reload_epoch")


def set_reload_epoch(trainer: L.Trainer, epoch: Any) -> None:
    _swap(trainer.fit_loop, "_last_train_dl_reload_epoch", epoch)


# ---- what the loop does next --------------------------------------------------------------------


def is_accumulating(trainer: L.Trainer) -> bool:
    """Whether this micro-batch ends without an update: the loop's own answer."""
    return _attribute(trainer.fit_loop.epoch_loop, "_should_accumulate")()


def make_update(trainer: L.Trainer, batch: Any, batch_idx: int) -> None:
    """Do what the loop does with a batch until there is an update, which may take several times."""
    loop = trainer.fit_loop.epoch_loop
    counted = loop.batch_progress.current
    begun = counted.ready
    while True:
        index = batch_idx + counted.ready - begun  # the first of an update clears the gradients
        given = _attribute(loop, "_build_kwargs")(OrderedDict(), batch, index)
        if trainer.lightning_module.automatic_optimization:
            loop.automatic_optimization.run(trainer.optimizers[0], index, given)
        else:
            loop.manual_optimization.run(given)
        if not is_accumulating(trainer):
            break
        counted.ready += 1
    counted.ready = begun


def is_pass_over(trainer: L.Trainer) -> bool:
    """Whether this batch was the last one of the pass."""
    return _attribute(trainer.fit_loop.epoch_loop, "_num_ready_batches_reached")()


def is_validation_due(trainer: L.Trainer) -> bool:
    """Whether validation comes after this batch. The loop's answer asks its source of batches."""
    fetcher = _attribute(trainer.fit_loop, "_data_fetcher")
    assert fetcher is not None
    return _attribute(trainer.fit_loop.epoch_loop, "_should_check_val_fx")(fetcher)


# ---- a checkpoint in memory ---------------------------------------------------------------------


def checkpoint_now(trainer: L.Trainer) -> dict[str, Any]:
    """A whole checkpoint, as `save_checkpoint` writes one. Publicly it goes to a file only."""
    return _attribute(trainer, "_checkpoint_connector").dump_checkpoint(weights_only=False)


def begin_with_checkpoint(trainer: L.Trainer, checkpoint: dict[str, Any]) -> None:
    """Let a fit begin with this checkpoint. Call it in `Strategy.setup`, before it restores."""
    _swap(_attribute(trainer, "_checkpoint_connector"), "_loaded_checkpoint", checkpoint)
