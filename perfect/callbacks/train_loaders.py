"""What the callbacks ask of a train loader, whichever kind it is."""

from typing import Any

import lightning as L

from loaders import ReuseLoader
from loaders.adopting.adoption import decoded_columns
from loaders.order.keyed_permutation import samples_per_rank
from loaders.order.reuse import batches_per_pass
from loaders.sharing.shared_view import SharedView
from perfect.method.phases import PhaseError
from trainers.elastic.peer.lane_shares import LaneShares
from trainers.lightning_seams import data_source

TrainLoader = ReuseLoader | SharedView | LaneShares
LoaderState = dict[str, Any]
"""What `state_dict()` of a train loader returns: a few numbers and words."""


def find_train_loader(trainer: L.Trainer) -> TrainLoader:
    """Ask for the train loader once and keep it, so that its hook does not make another one."""
    source = data_source(trainer)
    try:
        loader = source.dataloader()
    except Exception as error:
        error.add_note(
            "PhaseSwitch asked for the train loader before the module's own setup('fit') to learn"
            " how many steps there are; if the module makes its data there, give the loader to"
            " trainer.fit() or make it in a LightningDataModule"
        )
        raise
    dealt = trainer.strategy.process_dataloader(loader)
    if isinstance(dealt, LaneShares):
        loader = dealt
    if isinstance(loader, SharedView) and loader.pieces > 1:
        raise PhaseError(
            f"PhaseSwitch counts a pass in whole batches, but {loader.name} cuts those of its"
            " stream: leave batch_size out of view()"
        )
    if not isinstance(loader, TrainLoader):
        raise PhaseError(
            f"PhaseSwitch needs a ReuseLoader as the train loader, not {type(loader).__name__}:"
            " ReuseLoader.from_dataloader(loader) makes one from a DataLoader"
        )
    source.instance = loader
    return loader


def batches_of_pass(loader: TrainLoader, batch_size: int, reuse: int) -> int:
    """The batches of a whole pass that is served like this."""
    if isinstance(loader, LaneShares):
        return loader.batches_of(batch_size, reuse)
    share = samples_per_rank(len(loader.dataset), loader.world_size)
    return batches_per_pass(share, batch_size, reuse, loader.mode, loader.drop_last)


def limited(batches: int, limit: int | float) -> int:
    """Return how many batches `limit_train_batches` leaves of a pass."""
    return min(batches, limit) if isinstance(limit, int) else int(batches * limit)


def is_in_a_pass(loader: TrainLoader) -> bool:
    """Whether a pass is under way."""
    if isinstance(loader, LaneShares):
        return loader.in_a_pass
    return bool(loader.state_dict()["served_batches"])


def in_memory(loader: TrainLoader) -> bool:
    """Whether the data set is in memory, so that nothing is decoded: first serves are counted."""
    return decoded_columns(loader.dataset) is not None


def decoded_by_all(trainer: L.Trainer, loader: TrainLoader) -> int:
    """So many samples all ranks have decoded; in a swarm, so many first serves there were."""
    if isinstance(loader, LaneShares):
        return loader.first_serves
    return trainer.world_size * loader.stats.decoded


def served_in_pass(state: LoaderState) -> int:
    """The batches that a loader in this state has served of its pass."""
    lanes = state.get("lanes")
    return int(state["served_batches"] if lanes is None else lanes["step"])


def next_pass(state: LoaderState) -> LoaderState:
    """Return the state after leaving the pass in the middle of which `state` is."""
    if not served_in_pass(state):
        return state
    lanes = state.get("lanes")
    if lanes is None:
        return state | {"pass": state["pass"] + 1, "served_batches": 0, "running": state["next"]}
    left = {"pass": lanes["pass"] + 1, "step": 0, "running": lanes["next"]}
    return state | {"lanes": lanes | left}
