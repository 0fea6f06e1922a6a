"""Where a run trains: as a peer of a swarm, or once more from the swarm's logs.

    berth_in_swarm     joins at an anchor, and begins with the state of the swarm; leaves when it
                       is asked
    berth_in_replay    makes every step of a swarm again, in one process

Everything else of a run is as it is alone (berth.py).
"""

from typing import Any

import lightning as L
from lightning.pytorch.strategies import Strategy
from rich.console import Console

from perfect.assembly.berth import Berth
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
        read_secret(given.secret_file, loose=given.loose_key)
        if given.host is not None:
            check_host(given.host, given.insecure_network)
    except SecretError as error:
        raise BuildError("elastic.secret_file", str(error)) from error
    except InsecureNetwork as error:
        said = InsecureNetwork(error.fact, "elastic.insecure_network: true")
        raise BuildError("elastic.host", str(said)) from error
    except AddressError as error:
        raise BuildError("elastic.host", str(error)) from error


def berth_in_swarm(console: Console, folder: RunFolder, join: str, name: str = "") -> Berth:
    """`join`: the anchors' addresses; `name`: of this peer (default: made up). The strategy has
    this peer's checkpoint: the swarm decides whose state is the newest."""

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
            )
        except (AddressError, CannotBeElastic) as error:
            raise BuildError("elastic", str(error)) from error

    stop = StopSignal(console)
    return Berth(
        console=console,
        strategy=strategy,
        callbacks=(stop,),
        asked=stop.asked,
        own_folder=True,
        loads_checkpoint=False,
    )


def berth_in_replay(console: Console, replay: ReplayStrategy) -> Berth:
    return Berth(
        console=console,
        strategy=lambda _: replay,
        callbacks=(_LastKnownStep(replay),),
        own_folder=True,
        loads_checkpoint=False,
    )


class _LastKnownStep(L.Callback):
    """Ends the replay where the logs end, also in the middle of a pass."""

    def __init__(self, replay: ReplayStrategy) -> None:
        self._replay = replay

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step >= self._replay.history.steps:
            trainer.should_stop = True
