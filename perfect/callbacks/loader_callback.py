"""`LoaderCallback` serves a `ReuseLoader` in the user's own Trainer, without phases.

A view of a `SharedStream` is a loader to it like any other, and so is what a swarm deals.

    checkpoint    contains the loader's state, as the state of this callback
    fit start     with overfit_batches, the loader stops shuffling
    train start   the state is restored, whatever Lightning did with it
    epoch start   if the length of the pass has changed, Lightning reads it again; a loader made by
                  reload_dataloaders_every_n_epochs continues with the passes of the previous one
    batch end     loader/decoded, loader/stall_share, loader/serves/1, ... go to the loggers

Lightning itself restores a loader's state only if the epoch was not over, and only if nobody read
`trainer.estimated_stepping_batches` before; otherwise training would continue with pass 0. The
numbers are those of rank 0.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import lightning as L

from loaders import LoaderError, ReuseLoader
from loaders.order.keyed_permutation import samples_per_rank
from loaders.stats import LOGGED
from perfect.callbacks.train_loaders import (
    LoaderState,
    TrainLoader,
    limited,
    next_pass,
    served_in_pass,
)
from trainers.lightning_seams import (
    data_source,
    forget_loader,
    logged_step,
    reload_epoch,
    set_reload_epoch,
    should_update_logs,
)

log = logging.getLogger(__name__)


class LoaderCallback(L.Callback):
    """Carries the train loader's state in checkpoints, and logs its counters."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, *, same_steps: bool | None = None
    ) -> None:
        """`same_steps`: whether a fit ends after as many steps as with a DataLoader, though reuse
        makes its epochs longer. None: they stay longer, and a warning says so."""
        self._clock = clock
        self._same_steps = same_steps
        self._loader: TrainLoader | None = None
        self._loaded: LoaderState | None = None
        self._epoch_batches: int | float = 0
        self._ahead = False
        self._since = 0.0
        self._trained = 0.0
        self._logged = (0.0, 0.0)

    def state_dict(self) -> dict[str, Any]:
        if self._loader is None:
            return {} if self._loaded is None else {"loader": self._loaded}
        state = self._loader.state_dict()
        if served_in_pass(state) >= self._epoch_batches:  # limit_train_batches cut it short
            state = next_pass(state)
        return {"loader": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict.get("loader")

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if vars(trainer)["overfit_batches"]:  # pyright knows no such attribute
            _serve_alike(trainer)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Limit the steps before optimizers are made, whose schedules may count them."""
        if stage != "fit" or not self._same_steps or trainer.max_epochs in (None, -1):
            return
        if not pl_module.automatic_optimization:
            raise LoaderError(
                "same_steps=True counts the steps of automatic optimization, but the module takes"
                " its own: divide max_epochs by the reuse instead, and leave same_steps out"
            )
        trainer.fit_loop.setup_data()
        batches = _batches_without_reuse(trainer, _train_loader(trainer))
        steps = trainer.max_epochs * -(-batches // trainer.accumulate_grad_batches)
        limit = trainer.max_steps
        trainer.fit_loop.epoch_loop.max_steps = steps if limit == -1 else min(steps, limit)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        others: list[L.Callback] = vars(trainer)["callbacks"]  # pyright knows no such attribute
        if any(getattr(other, "restored_loader", False) for other in others):
            self._loaded = None  # a PhaseSwitch did, and may have ended a pass since
        self.restore(trainer)
        reuse = 1 if self._loader is None else self._loader.reuse
        open_ended = trainer.max_epochs in (None, -1) or trainer.max_steps != -1
        if self._same_steps is None and reuse > 1 and not open_ended and trainer.is_global_zero:
            log.warning(
                "with reuse %d max_epochs=%s trains %d times as many steps as with a DataLoader:"
                " LoaderCallback(same_steps=True) ends the fit after as many,"
                " LoaderCallback(same_steps=False) says that you want more",
                reuse, trainer.max_epochs, reuse,
            )  # fmt: skip

    def restore(self, trainer: L.Trainer) -> bool:
        """Have the loader go on as the loaded state says. Return whether there was one."""
        loader = self._loader = _train_loader(trainer)
        state, self._loaded = self._loaded, None
        if state is not None:
            if not trainer.fit_loop.restarting:  # Lightning begins an epoch
                state = next_pass(state)
            loader.load_state_dict(state)
            if _epoch_batches(trainer, loader) != trainer.num_training_batches:
                _read_again(trainer, loader)
                loader.load_state_dict(state)  # Lightning may have restored its own state
            # After a checkpoint of an epoch's end, Lightning trains one more batch of that epoch.
            done = trainer.fit_loop.epoch_loop.batch_progress.current.completed
            self._ahead = trainer.fit_loop.restarting and done >= trainer.num_training_batches
        self._epoch_batches = trainer.num_training_batches
        self._since = self._clock()
        self._logged = (self._trained, loader.stats.stall_seconds)
        return state is not None

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        before, loader = self._loader, _train_loader(trainer)
        if before is not None and loader is not before:
            _continue_from(before, loader)
        elif self._ahead:
            loader.load_state_dict(loader.state_dict())  # continue after that batch
        self._ahead = False
        self._loader = loader
        if trainer.world_size > 1:
            # Each rank measures its own reuse for "auto", but passes must be equally long.
            reuse = trainer.strategy.broadcast(loader.reuse)
            if reuse != loader.reuse:
                loader.set_reuse(reuse)
        if _epoch_batches(trainer, loader) != trainer.num_training_batches:
            _read_again(trainer, loader)
        self._epoch_batches = trainer.num_training_batches

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._since = self._clock()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        now = self._clock()
        self._trained += now - self._since
        self._since = now
        if not trainer.loggers or not should_update_logs(trainer):
            return
        assert self._loader is not None
        stats = self._loader.stats
        trained, stalled = self._logged
        self._logged = (self._trained, stats.stall_seconds)
        share = (stats.stall_seconds - stalled) / max(self._trained - trained, 1e-9)
        counters = {f"loader/{name}": float(stats[name]) for name in LOGGED}
        # `loader/serves/1` counts the first serves of samples.
        counters |= {f"loader/serves/{n}": float(k) for n, k in enumerate(stats.serves, 1)}
        counters["loader/stall_share"] = share
        for logger in trainer.loggers:
            logger.log_metrics(counters, step=logged_step(trainer))


def _train_loader(trainer: L.Trainer) -> TrainLoader:
    loader = trainer.train_dataloader
    if isinstance(loader, TrainLoader):
        return loader
    if isinstance(loader, list | tuple | dict):
        raise LoaderError(
            f"LoaderCallback carries the state of one train loader, but there are {len(loader)}:"
            " give trainer.fit() one ReuseLoader, or leave LoaderCallback out"
        )
    raise LoaderError(
        f"LoaderCallback needs a ReuseLoader as the train loader, not {type(loader).__name__}:"
        " ReuseLoader.from_dataloader(loader) makes one from a DataLoader"
    )


def _serve_alike(trainer: L.Trainer) -> None:
    """Have all passes alike for Trainer(overfit_batches=...), as Lightning does with a DataLoader:
    without shuffling. Lightning can give another sampler to a DataLoader only."""
    source = data_source(trainer)
    loader = source.instance = source.dataloader()
    if not isinstance(loader, ReuseLoader):
        raise LoaderError(
            f"Trainer(overfit_batches=...) trains on the same batches in every epoch, and a"
            f" {type(loader).__name__} shuffles: give a ReuseLoader"
        )
    loader.stop_shuffling()


def _continue_from(before: TrainLoader, loader: TrainLoader) -> None:
    """Give a new loader the pass, the counters and the choice of reuse of the previous loader."""
    old, new = next_pass(before.state_dict()), loader.state_dict()
    new |= {"pass": max(old["pass"], new["pass"]), "served_batches": 0, "stats": old["stats"]}
    if old["tuner"] and new["tuner"]:
        new["tuner"] = old["tuner"]
        new["next"] = new["next"] | {"reuse": old["next"]["reuse"]}
    loader.load_state_dict(new)


def _epoch_batches(trainer: L.Trainer, loader: TrainLoader) -> int:
    limit = trainer.limit_train_batches
    try:
        batches = len(loader)
    except TypeError as error:
        if isinstance(limit, int):
            return limit
        raise LoaderError(
            "nobody knows how many batches a pass of the stream has, so Lightning takes one more"
            " from the loader than it trains, and a run that goes on from a checkpoint would miss"
            " it: give the stream samples=, or Trainer limit_train_batches="
        ) from error
    return limited(batches, limit)


def _batches_without_reuse(trainer: L.Trainer, loader: TrainLoader) -> int:
    """How many batches an epoch has where every sample is served once."""
    share = samples_per_rank(len(loader.dataset), loader.world_size)
    if isinstance(loader, ReuseLoader):
        share = loader.share
    whole, rest = divmod(share, loader.batch_size)
    return limited(whole + (rest > 0 and not loader.drop_last), trainer.limit_train_batches)


def _read_again(trainer: L.Trainer, loader: TrainLoader) -> None:
    """Make the fit loop read the length of this loader, without asking for another one."""
    source, reloaded = data_source(trainer), reload_epoch(trainer)
    asked, source.instance = source.instance, loader
    forget_loader(trainer)
    try:
        trainer.fit_loop.setup_data()
    finally:
        source.instance = asked
        set_reload_epoch(trainer, reloaded)
