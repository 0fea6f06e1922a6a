"""Where a run trains: alone in its process, or as a job of a fleet.

    berth_alone       its own strategy and device; Ctrl-C asks it to stop
    berth_in_fleet    the fleet's strategy, on the device that its seat names; the fleet asks it to
                      leave

Everything else of a run is the same in both, and so are its numbers.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
from lightning.pytorch.strategies import Strategy
from rich.console import Console

from loaders import ReuseLoader
from loaders.sharing.shared_view import SharedView
from perfect.assembly.strategy import build_strategy
from perfect.config.schema import RunConfig
from perfect.runs.stop import StopSignal
from trainers.fleet.jobs.seat import Seat


def _configured_device(config: RunConfig) -> dict[str, Any]:
    return {"accelerator": config.trainer.accelerator, "devices": config.trainer.devices}


def _same_loader(loader: ReuseLoader) -> ReuseLoader | SharedView:
    return loader


@dataclass(frozen=True, slots=True, kw_only=True)
class Berth:
    """What a run has to know of where it trains."""

    console: Console
    """For what the run says."""
    strategy: Callable[[RunConfig], Strategy | str]
    callbacks: Sequence[L.Callback]
    """The Trainer has these, besides the run's own."""
    asked: Callable[[], bool] = lambda: False
    """Says whether the run should write a checkpoint and stop."""
    stopped: Callable[[], bool] = lambda: False
    """Says whether the run was ended early for good."""
    clock: Callable[[], float] = time.perf_counter
    """Returns the seconds of a clock that stands while others train."""
    device: Callable[[RunConfig], dict[str, Any]] = _configured_device
    """Returns the Trainer's arguments that name the device."""
    train_loader: Callable[[ReuseLoader], ReuseLoader | SharedView] = _same_loader
    """Returns what the run trains with, if it has made this loader."""
    own_folder: bool = False
    """Whether every rank has a run folder of its own."""
    loads_checkpoint: bool = True
    """Whether Lightning loads the checkpoint of a run that has one."""


def berth_alone(console: Console) -> Berth:
    stop = StopSignal(console)
    return Berth(console=console, strategy=build_strategy, callbacks=(stop,), asked=stop.asked)


def berth_in_fleet(seat: Seat, console: Console) -> Berth:
    def strategy(config: RunConfig) -> Strategy | str:
        """Return the fleet's strategy, with the run's own options. A run without `offload` in a
        fleet without a budget is plain Lightning's, as it is alone."""
        if config.offload is None and seat.budget is None:
            return build_strategy(config)
        options = {} if config.offload is None else config.offload.model_dump()
        # What the run leaves open is the fleet's to say.
        of_fleet = ("budget", "host_budget", "plan_cache")
        left_open = [name for name in of_fleet if options.get(name) is None]
        return seat.strategy(**{k: v for k, v in options.items() if k not in left_open})

    def train_loader(loader: ReuseLoader) -> ReuseLoader | SharedView:
        """Runs of a fleet that would read the same read it together."""
        return loader if seat.input is None else seat.input.shared(loader)

    return Berth(
        console=console,
        strategy=strategy,
        callbacks=tuple(seat.callbacks),
        asked=lambda: bool(seat.leave_asked),
        stopped=lambda: seat.leave_asked == "stopped",
        clock=lambda: time.perf_counter() - seat.waited,
        device=lambda _: seat.on_device,
        train_loader=train_loader,
    )
