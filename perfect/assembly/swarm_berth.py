"""Where a run trains: as a peer of a swarm, or once more from the swarm's logs.

    InSwarm    joins at an anchor, and begins with the state of the swarm; leaves when it is asked
    InReplay   makes every step of a swarm again, in one process

Everything else of a run is as it is alone (berth.py).
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import lightning as L
from lightning.pytorch.strategies import Strategy
from rich.console import Console

from loaders import ReuseLoader
from perfect.config.elastic_schema import ElasticConfig
from perfect.config.schema import RunConfig, dump_config
from perfect.config.shared_keys import shared_keys
from perfect.errors import BuildError
from perfect.runs.folder import RunFolder
from perfect.runs.stop import StopSignal
from trainers.elastic.errors import CannotBeElastic
from trainers.elastic.peer.elastic_strategy import ElasticStrategy
from trainers.elastic.peer.replay_strategy import ReplayStrategy
from trainers.elastic.wire import (
    AddressError,
    InsecureNetwork,
    SecretError,
    check_host,
    read_secret,
)


def check_node(given: ElasticConfig) -> None:
    """Raise `BuildError` if this machine cannot be a peer as the section says."""
    try:
        read_secret(given.secret_file)
        if given.host is not None:
            check_host(given.host, given.insecure_network)
    except SecretError as error:
        raise BuildError("elastic.secret_file", str(error)) from error
    except InsecureNetwork as error:
        said = InsecureNetwork(error.fact, "elastic.insecure_network: true")
        raise BuildError("elastic.host", str(said)) from error
    except AddressError as error:
        raise BuildError("elastic.host", str(error)) from error


@final
class InSwarm:
    own_folder = True

    def __init__(self, console: Console, folder: RunFolder, join: str, name: str = "") -> None:
        """`join`: the anchors' addresses; `name`: of this peer (default: made up)."""
        self.console = console
        self._folder = folder
        self._join = join
        self._name = name
        self._stop = StopSignal(console)
        self.callbacks: Sequence[L.Callback] = (self._stop,)

    def asked(self) -> bool:
        return self._stop.asked()

    @property
    def stopped(self) -> bool:
        return False

    def clock(self) -> float:
        return time.perf_counter()

    def strategy(self, config: RunConfig) -> Strategy | str:
        given = config.elastic
        assert given is not None, "only a run with the section is a peer"
        check_node(given)
        own = self._folder.checkpoint
        try:
            return ElasticStrategy(
                lanes=given.lanes,
                join=self._join,
                secret_file=given.secret_file,
                sum=given.sum,
                checkpoint=own if self._folder.checkpoint_step() is not None else None,
                host=given.host or "",
                name=self._name,
                insecure_network=given.insecure_network,
                alike=shared_keys(dump_config(config)),
                budget=None if config.offload is None else config.offload.budget,
            )
        except (AddressError, CannotBeElastic) as error:
            raise BuildError("elastic", str(error)) from error

    def begins_with(self, checkpoint: Path) -> str | None:
        """The strategy has this peer's checkpoint: the swarm decides whose state is the newest."""
        return None

    def train_loader(self, loader: ReuseLoader) -> ReuseLoader:
        return loader

    def device(self, config: RunConfig) -> dict[str, Any]:
        return {"accelerator": config.trainer.accelerator, "devices": 1}


@final
class InReplay:
    own_folder = True

    def __init__(
        self, console: Console, logs: Sequence[Path], budget: str | int | None = None
    ) -> None:
        """`budget`: of bytes of the device, as the peer had it."""
        self.console = console
        self.replay = ReplayStrategy(logs, budget=budget)
        self.callbacks: Sequence[L.Callback] = (_LastKnownStep(self.replay),)

    def asked(self) -> bool:
        return False

    @property
    def stopped(self) -> bool:
        return False

    def clock(self) -> float:
        return time.perf_counter()

    def strategy(self, config: RunConfig) -> Strategy | str:
        return self.replay

    def begins_with(self, checkpoint: Path) -> str | None:
        return None

    def train_loader(self, loader: ReuseLoader) -> ReuseLoader:
        return loader

    def device(self, config: RunConfig) -> dict[str, Any]:
        return {"accelerator": config.trainer.accelerator, "devices": 1}


class _LastKnownStep(L.Callback):
    """Ends the replay where the logs end, also in the middle of a pass."""

    reads_weights_between_steps = False

    def __init__(self, replay: ReplayStrategy) -> None:
        self._replay = replay

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if trainer.global_step >= self._replay.history.steps:
            trainer.should_stop = True
