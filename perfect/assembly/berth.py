"""Where a run trains: alone in its process, as a job of a fleet, as a peer of a swarm, or once more
from a swarm's logs.

    berth_alone       its own strategy and device; Ctrl-C asks it to stop
    berth_in_fleet    the fleet's strategy, on the device that its seat names; the fleet asks it to
                      leave
    berth_in_swarm    joins at an anchor, and begins with the state of the swarm; leaves when it is
                      asked
    berth_in_replay   makes every step of a swarm again, in one process
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning as L
from lightning.pytorch.strategies import Strategy
from rich.console import Console

from loaders import ReuseLoader
from loaders.sharing.shared_view import SharedView
from offload import BudgetTooSmall, CaptureError, OffloadError
from offload.running.drivers.device_loss import device_lost
from perfect.config.elastic_schema import ElasticConfig, shared_keys
from perfect.config.schema import RunConfig, dump_config
from perfect.errors import BuildError
from perfect.runs.checkpoint import StopSignal
from perfect.runs.folder import RunFolder
from trainers import OffloadStrategy
from trainers.elastic.errors import CannotBeElastic
from trainers.elastic.peer.elastic_strategy import ElasticStrategy
from trainers.elastic.peer.replay_strategy import LanePlanStrategy, ReplayStrategy
from trainers.elastic.wire.listener import check_host
from trainers.elastic.wire.secret import read_secret
from trainers.elastic.wire.wire_errors import AddressError, InsecureNetwork, SecretError
from trainers.fleet.jobs.seat import Seat


def build_strategy(config: RunConfig) -> Strategy | str:
    if config.elastic is not None and config.offload is not None:
        # A run with this section joins a swarm. Only --check comes here, and only looks at it.
        lanes, sums = config.elastic.lanes, config.elastic.sum
        return LanePlanStrategy(None, lanes, sums, config.offload.budget)
    if config.offload is None:
        return "ddp" if config.trainer.devices > 1 else "auto"
    if config.trainer.devices > 1:
        why = (
            f"is {config.trainer.devices}, but a process trains on each of them, and offload plans"
        )
        raise BuildError("trainer.devices", f"{why} one process: give offload.devices instead")
    _count_devices(config)
    try:
        return OffloadStrategy(**config.offload.model_dump())
    except (OffloadError, ValueError) as error:  # the schema has checked all but this machine
        raise BuildError(_key(error, "offload.engine"), str(error)) from error


def _count_devices(config: RunConfig) -> int:
    """Return over how many devices each step of a run is spread that is no job of a fleet."""
    devices = 1 if config.offload is None else config.offload.devices
    if isinstance(devices, str):
        why = f"is {devices!r}, a range, which only a job of a fleet may have"
        raise BuildError("offload.devices", f"{why}: give a number")
    return devices


def check_device(trainer: L.Trainer) -> None:
    """Refuse an engine that does not run on the device which the Trainer has chosen."""
    if not isinstance(trainer.strategy, OffloadStrategy):
        return
    try:
        trainer.strategy.find_target()
    except OffloadError as error:
        raise BuildError(_key(error, "trainer.accelerator"), str(error)) from error


def _key(error: Exception, otherwise: str) -> str:
    """Return the key that the error begins with, as `engine='cuda' needs ...` does."""
    named = str(error).split("=")[0]
    return f"offload.{named}" if named in ("engine", "host_dir") else otherwise


@contextmanager
def watched(trainer: L.Trainer) -> Iterator[None]:
    """Raise `DeviceLost` in place of any error of this block that says so."""
    try:
        yield
    except Exception as error:
        lost = device_lost(error, trainer.strategy.root_device)
        if lost is None or lost is error:
            raise
        raise lost from error


@contextmanager
def blamed() -> Iterator[None]:
    """Raise an error of this block with the key that would have prevented it, if there is one."""
    try:
        yield
    except OffloadError as error:
        if isinstance(error, BudgetTooSmall):
            host = "host_budget" in str(error)
            key = "offload.host_budget" if host else "offload.budget"
        elif isinstance(error, CaptureError) or type(error) is OffloadError:
            key = "offload"
        else:
            raise
        raise BuildError(key, str(error)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Berth:
    """What a run has to know of where it trains."""

    console: Console
    strategy: Callable[[RunConfig], Strategy | str]
    callbacks: Sequence[L.Callback]
    """The Trainer has these, besides the run's own."""
    stop_requested: Callable[[], bool] = lambda: False
    """Says whether the run should write a checkpoint and stop."""
    stopped: Callable[[], bool] = lambda: False
    """Says whether the run was ended early for good."""
    clock: Callable[[], float] = time.perf_counter
    """Returns the seconds of a clock that stops while others train."""
    device: Callable[[RunConfig], dict[str, Any]] = lambda config: {
        "accelerator": config.trainer.accelerator,
        "devices": config.trainer.devices,
    }
    """Returns the Trainer's arguments that name the device."""
    train_loader: Callable[[ReuseLoader], ReuseLoader | SharedView] = lambda loader: loader
    """Returns what the run trains with, if it has made this loader."""
    own_folder: bool = False
    """Whether every rank has a run folder of its own."""
    loads_checkpoint: bool = True
    """Whether Lightning loads the checkpoint of a run that has one."""


def berth_alone(console: Console) -> Berth:
    stop = StopSignal(console)
    return Berth(
        console=console,
        strategy=build_strategy,
        callbacks=(stop,),
        stop_requested=stop.is_requested,
    )


def berth_in_fleet(seat: Seat, console: Console) -> Berth:
    def strategy(config: RunConfig) -> Strategy | str:
        """Return the fleet's strategy, with the run's own options. A run without `offload` in a
        fleet without a budget is plain Lightning's, as it is alone."""
        if config.offload is None and seat.settings.budget is None:
            return build_strategy(config)
        options = {} if config.offload is None else config.offload.model_dump()
        # The fleet decides what the run leaves open.
        of_fleet = ("budget", "host_budget", "plan_cache")
        left_open = ["devices", *(name for name in of_fleet if options.get(name) is None)]
        return seat.strategy(**{k: v for k, v in options.items() if k not in left_open})

    return Berth(
        console=console,
        strategy=strategy,
        callbacks=tuple(seat.callbacks),
        stop_requested=lambda: bool(seat.leave_asked),
        stopped=lambda: seat.leave_asked == "stopped",
        clock=lambda: time.perf_counter() - seat.turns.baton.waited,
        device=lambda _: seat.on_device,
        train_loader=seat.share_loader,  # runs that would read the same read it together
    )


def check_node(given: ElasticConfig) -> None:
    """Raise `BuildError` if this machine cannot be a peer as the section says."""
    try:
        read_secret(given.secret_file, loose=given.loose_key)
        if given.host is not None:
            check_host(given.host, given.insecure_network)
    except SecretError as error:
        raise BuildError("elastic.secret_file", str(error)) from error
    except InsecureNetwork as error:
        refusal = InsecureNetwork(error.fact, "elastic.insecure_network: true")
        raise BuildError("elastic.host", str(refusal)) from error
    except AddressError as error:
        raise BuildError("elastic.host", str(error)) from error


def berth_in_swarm(console: Console, folder: RunFolder, join: str, name: str = "") -> Berth:
    """`join`: the addresses of anchors; `name`: the name of this peer (default: made up). The
    strategy loads the checkpoint, because the swarm decides which peer has the newest state."""

    def strategy(config: RunConfig) -> Strategy:
        given = config.elastic
        assert given is not None, "only a run with the section is a peer"
        check_node(given)
        try:
            return ElasticStrategy(
                lanes=given.lanes,
                join=join,
                secret_file=given.secret_file,
                sum=given.sum,
                checkpoint=folder.checkpoint if folder.checkpoint_step() is not None else None,
                host=given.host or "",
                name=name,
                insecure_network=given.insecure_network,
                loose_key=given.loose_key,
                alike=shared_keys(dump_config(config)),
                budget=None if config.offload is None else config.offload.budget,
                devices=_count_devices(config),
            )
        except (AddressError, CannotBeElastic) as error:
            raise BuildError("elastic", str(error)) from error

    stop = StopSignal(console)
    return Berth(
        console=console,
        strategy=strategy,
        callbacks=(stop,),
        stop_requested=stop.is_requested,
        own_folder=True,
        loads_checkpoint=False,
    )


def berth_in_replay(console: Console, replay: ReplayStrategy) -> Berth:
    return Berth(
        console=console,
        strategy=lambda _: replay,
        callbacks=(StopWhen(lambda trainer: trainer.global_step >= replay.history.steps),),
        own_folder=True,
        loads_checkpoint=False,
    )


class StopWhen(L.Callback):
    """Ends a fit after a batch, also in the middle of a pass."""

    def __init__(self, is_over: Callable[[L.Trainer], bool]) -> None:
        self._is_over = is_over

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        trainer.should_stop |= self._is_over(trainer)
