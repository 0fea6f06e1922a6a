"""Builds the strategy that runs the steps from config.offload, and finds the key behind an error.

Without this section plain Lightning runs the steps; with it, an `OffloadStrategy` that takes its
keys as arguments.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import lightning as L
from lightning.pytorch.strategies import Strategy

from offload import BudgetTooSmall, CaptureError, OffloadError
from offload.running.drivers.device_loss import device_lost
from perfect.config.schema import RunConfig
from perfect.errors import BuildError
from trainers import OffloadDDPStrategy, OffloadStrategy
from trainers.elastic.peer.lane_plan_strategy import LanePlanStrategy
from trainers.offloading.planned_strategy import PlannedStrategy


def build_strategy(config: RunConfig) -> Strategy | str:
    if config.elastic is not None and config.offload is not None:
        # A run with this section joins a swarm, so here it is only looked at, by --check.
        lanes, sums = config.elastic.lanes, config.elastic.sum
        return LanePlanStrategy(None, lanes, sums, config.offload.budget)
    if config.offload is None:
        return "ddp" if config.trainer.devices > 1 else "auto"
    kind = OffloadDDPStrategy if config.trainer.devices > 1 else OffloadStrategy
    try:
        return kind(**config.offload.model_dump())
    except (OffloadError, ValueError) as error:  # the schema has checked all but this machine
        raise BuildError(_key(error, "offload.engine"), str(error)) from error


def check_device(trainer: L.Trainer) -> None:
    """Refuse an engine that does not run on the device which the Trainer has chosen."""
    if not isinstance(trainer.strategy, PlannedStrategy):
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
    """Raise `DeviceLost` in place of any error of this block that says that the device is lost,
    also in a run of plain Lightning."""
    try:
        yield
    except Exception as error:
        lost = device_lost(error, trainer.strategy.root_device)
        if lost is None or lost is error:
            raise
        raise lost from error


def to_blame(error: OffloadError) -> BuildError | None:
    """Return this error with the key that caused it; None if no key would have prevented it."""
    if isinstance(error, BudgetTooSmall):
        host = "host_budget" in str(error)
        return BuildError("offload.host_budget" if host else "offload.budget", str(error))
    if isinstance(error, CaptureError) or type(error) is OffloadError:
        return BuildError("offload", str(error))
    return None
