"""config.offload -> who runs the steps; and which line of the YAML is to blame where that fails.

no section   plain Lightning        a section   `OffloadStrategy` with its keys as arguments
"""

from collections.abc import Iterator
from contextlib import contextmanager

import lightning as L
from lightning.pytorch.strategies import Strategy

from offload import BudgetTooSmall, CaptureError, OffloadError
from offload.lost import device_lost
from perfect.config import RunConfig
from perfect.errors import BuildError
from trainers import OffloadDDPStrategy, OffloadStrategy
from trainers.planned import Planned


def build_strategy(config: RunConfig) -> Strategy | str:
    if config.offload is None:
        return "ddp" if config.trainer.devices > 1 else "auto"
    kind = OffloadDDPStrategy if config.trainer.devices > 1 else OffloadStrategy
    try:
        return kind(**config.offload.model_dump())
    except OffloadError as error:  # the schema has seen all but the machine
        raise BuildError("offload.engine", str(error)) from error


def check_device(trainer: L.Trainer) -> None:
    """What `accelerator: auto` has found is known only now."""
    if not isinstance(trainer.strategy, Planned):
        return
    try:
        trainer.strategy.find_target()
    except OffloadError as error:
        of_engine = str(error).startswith("engine=")
        key = "offload.engine" if of_engine else "trainer.accelerator"
        raise BuildError(key, str(error)) from error


@contextmanager
def watched(trainer: L.Trainer) -> Iterator[None]:
    """Around all that a trainer does, plain Lightning too: `DeviceLost` for every error that says
    so, wherever it comes from."""
    try:
        yield
    except Exception as error:
        lost = device_lost(error, trainer.strategy.root_device)
        if lost is None or lost is error:
            raise
        raise lost from error


def to_blame(error: OffloadError) -> BuildError | None:
    """The key that cannot be kept; None: the run failed, and no key would have saved it."""
    if isinstance(error, BudgetTooSmall):
        host = "host_budget" in str(error)
        return BuildError("offload.host_budget" if host else "offload.budget", str(error))
    if isinstance(error, CaptureError) or type(error) is OffloadError:
        return BuildError("offload", str(error))
    return None
