"""Where a run trains: alone in its process, or as a job of a fleet.

    Alone     its own strategy and device; Ctrl-C asks it to stop
    InFleet   the fleet's strategy, on the device that its seat names; the fleet asks it to leave

Everything else of a run is the same in both, and so are its numbers.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, final

import lightning as L
from lightning.pytorch.strategies import Strategy
from rich.console import Console

from loaders import ReuseLoader
from loaders.sharing.shared_view import SharedView
from perfect.assembly.strategy import build_strategy
from perfect.config.schema import RunConfig
from perfect.runs.stop import StopSignal
from trainers.fleet.jobs.seat import Seat


class Berth(Protocol):
    """What a run has to know of where it trains."""

    @property
    def console(self) -> Console:
        """For what the run says."""
        ...

    @property
    def callbacks(self) -> Sequence[L.Callback]:
        """The Trainer has these, besides the run's own."""
        ...

    @property
    def own_folder(self) -> bool:
        """Whether every rank has a run folder of its own."""
        ...

    def asked(self) -> bool:
        """Whether the run should write a checkpoint and stop."""
        ...

    @property
    def stopped(self) -> bool:
        """Whether the run was ended early for good."""
        ...

    def clock(self) -> float:
        """Return the seconds of a clock that stands while others train."""
        ...

    def strategy(self, config: RunConfig) -> Strategy | str: ...

    def begins_with(self, checkpoint: Path) -> str | None:
        """Return the checkpoint that Lightning loads, of a run that has this one."""
        ...

    def train_loader(self, loader: ReuseLoader) -> ReuseLoader | SharedView:
        """Return what the run trains with, if it has made this loader."""
        ...

    def device(self, config: RunConfig) -> dict[str, Any]:
        """Return the Trainer's arguments that name the device."""
        ...


@final
class Alone:
    own_folder = False

    def __init__(self, console: Console) -> None:
        self.console = console
        self._stop = StopSignal(console)
        self.callbacks = (self._stop,)

    def asked(self) -> bool:
        return self._stop.asked()

    @property
    def stopped(self) -> bool:
        return False

    def clock(self) -> float:
        return time.perf_counter()

    def strategy(self, config: RunConfig) -> Strategy | str:
        return build_strategy(config)

    def begins_with(self, checkpoint: Path) -> str | None:
        return str(checkpoint)

    def train_loader(self, loader: ReuseLoader) -> ReuseLoader | SharedView:
        return loader

    def device(self, config: RunConfig) -> dict[str, Any]:
        return {"accelerator": config.trainer.accelerator, "devices": config.trainer.devices}


@final
class InFleet:
    own_folder = False

    def __init__(self, seat: Seat, console: Console) -> None:
        self.console = console
        self._seat = seat
        self.callbacks = tuple(seat.callbacks)

    def asked(self) -> bool:
        return bool(self._seat.leave_asked)

    @property
    def stopped(self) -> bool:
        return self._seat.leave_asked == "stopped"

    def clock(self) -> float:
        return time.perf_counter() - self._seat.waited

    def strategy(self, config: RunConfig) -> Strategy | str:
        """Return the fleet's strategy, with the run's own options. A run without `offload` in a
        fleet without a budget is plain Lightning's, as it is alone."""
        if config.offload is None and self._seat.budget is None:
            return build_strategy(config)
        options = {} if config.offload is None else config.offload.model_dump()
        # What the run leaves open is the fleet's to say.
        of_fleet = ("budget", "host_budget", "plan_cache")
        left_open = [name for name in of_fleet if options.get(name) is None]
        return self._seat.strategy(**{k: v for k, v in options.items() if k not in left_open})

    def begins_with(self, checkpoint: Path) -> str | None:
        return str(checkpoint)

    def train_loader(self, loader: ReuseLoader) -> ReuseLoader | SharedView:
        """Runs of a fleet that would read the same read it together."""
        return loader if self._seat.input is None else self._seat.input.shared(loader)

    def device(self, config: RunConfig) -> dict[str, Any]:
        return self._seat.on_device
