"""The arguments of `ReuseLoader` that a DataLoader gives, and what to say of them.

seed      its DistributedSampler's or its generator's; else torch.initial_seed(), which
          DataLoader draws from too; where rank and world_size are given, 0: processes that
          cannot compare their seeds must not have different ones
workers   processes, as DataLoader has, unless the data set is known to be safe in threads
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from loaders.adopting.adoption import from_dataloader, split_dataset
from loaders.adopting.thread_safety import check_sendable


@dataclass(frozen=True, slots=True)
class AdoptedArguments:
    """What `ReuseLoader` takes over from a DataLoader."""

    arguments: dict[str, Any]
    seed_from: str
    """Where the seed comes from. Empty: it was given."""
    kind_because: str
    """Why threads read, or processes. Empty: it was given, or there is nothing to say."""
    notes: tuple[str, ...]
    """What has no effect."""


def adopted_arguments(dataloader: DataLoader[Any], changes: Mapping[str, Any]) -> AdoptedArguments:
    """`changes` are arguments that were given beside the DataLoader, and replace what it says."""
    splits = changes.get("augment") is None and changes.get("once") is None
    adopted = from_dataloader(dataloader, splits)
    given = {**adopted.arguments(), **changes}
    seed, seed_from = _seed(dataloader, given)
    if "seed" in changes:
        seed, seed_from = changes["seed"], ""
    kind = type(dataloader.dataset).__name__
    because = ""
    listed = not isinstance(dataloader.dataset, IterableDataset)
    if "worker_kind" not in changes and dataloader.num_workers and listed:
        because = f"{kind} is known to be safe in them"
        if given["worker_kind"] == "process":
            dataset = split_dataset(dataloader.dataset)[0] if splits else dataloader.dataset
            if changes.get("start_method") != "fork":
                check_sendable(dataset, dataloader.num_workers)
            because = f'{kind} is not known to be safe in threads; worker_kind="thread" if it is'
            if given.get("worker_init_fn") is not None:
                because = "worker_init_fn is for them"
    return AdoptedArguments({**given, "seed": seed}, seed_from, because, adopted.notes)


def _seed(dataloader: DataLoader[Any], given: Mapping[str, Any]) -> tuple[int, str]:
    if "seed" in given:
        kind = type(dataloader.sampler).__name__
        return given["seed"], f"of its {'generator' if dataloader.generator else kind}"
    if given.get("world_size") not in (None, 1) or given.get("rank"):
        return 0, "as rank and world_size were given, and no seed"
    return torch.initial_seed(), "torch.initial_seed()"
