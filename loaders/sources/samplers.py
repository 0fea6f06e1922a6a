"""What a user's own sampler draws in a pass, as a function of (seed, pass): ids, or whole batches.

While they are drawn, torch's, numpy's, Python's and the sampler's own generators are seeded; then
they are restored. `set_epoch` is called with the number of the pass. Other state of a sampler (a
position, a history) cannot be restored. A sampler that names a rank (`named_rank`) draws the share
of that rank; any other draws the order of all ranks, of which every rank takes its share.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from operator import index
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from loaders.errors import LoaderError
from loaders.sources.randomness import attributes_of, generators_of, seeded_randomness

SAMPLER_STREAM = 2
"""Samplers draw from another stream of the seed than order and augmentation."""
MOST_DRAWN = 1 << 28
"""More ids of a pass would take more than 2 GiB."""
RANK_NAMES = ("rank", "_rank", "shard_index", "process_index")
"""What samplers call the rank for which they draw: torch's, and those of other libraries."""
COUNT_NAMES = (
    "num_replicas", "_num_replicas", "world_size", "_world_size", "num_shards", "num_processes",
)  # fmt: skip
"""What they call the number of ranks."""
CONTAINERS = (list, tuple, dict)
MOST_INSIDE = 64
"""A longer list that a sampler holds is one of ids, and not of samplers."""


@dataclass(frozen=True, slots=True)
class NamedRank:
    """The rank for which a sampler draws."""

    rank: int
    world_size: int


@contextmanager
def _begun(source: Any, seed: int, pass_index: int) -> Iterator[None]:
    """While a sampler draws, its draws are a function of the seed and the pass."""
    if (set_epoch := getattr(source, "set_epoch", None)) is not None:
        set_epoch(pass_index)
    with seeded_randomness(seed, SAMPLER_STREAM, pass_index, held=generators_of(source)):
        yield


def sampler_order(sampler: Iterable[int], seed: int, pass_index: int) -> NDArray[np.int64]:
    """Draw `len(sampler)` ids from a user's sampler, in its order, repeatably."""
    with _begun(sampler, seed, pass_index):
        name, wanted = type(sampler).__name__, length_of(sampler)
        drawn = islice(sampler, wanted + 1)
        ids = np.fromiter((_one_id(each, name) for each in drawn), dtype=np.int64)
    if len(ids) != wanted:
        gave = "more" if len(ids) > wanted else str(len(ids))
        raise LoaderError(
            f"the sampler {name} has a len() of {wanted} and gave {gave} in pass {pass_index}:"
            " make them agree"
        )
    return ids


def length_of(sampler: Any) -> int:
    """The number of ids that a user's sampler draws in a pass."""
    name = type(sampler).__name__
    try:
        length = len(sampler)
    except (TypeError, ValueError, OverflowError, NotImplementedError) as error:
        raise LoaderError(
            f"the sampler {name} has no len(), which is the length of a pass ({error}): give it"
            " one; one without an end is a stream: give an IterableDataset"
        ) from error
    if not 0 < length <= MOST_DRAWN:
        raise LoaderError(
            f"the sampler {name} has a len() of {length}, and all ids of a pass are drawn when it"
            f" begins: give one of 1 to {MOST_DRAWN}; one without an end is a stream: give an"
            " IterableDataset"
        )
    return length


def _one_id(drawn: Any, name: str) -> int:
    try:
        return index(drawn)
    except TypeError as error:
        raise LoaderError(
            f"the sampler {name} gave {drawn!r}, which is not one id: give single ids; batch them"
            " with batch_size"
        ) from error


def named_rank(sampler: object) -> NamedRank | None:
    """The rank that a sampler names, or something inside it. None: it draws for all ranks."""
    for part in _parts(sampler):
        rank, count = _number(part, RANK_NAMES), _number(part, COUNT_NAMES)
        if rank is not None and count is not None and 0 <= rank < count:
            return NamedRank(rank, count)
    return None


def _number(part: object, names: Iterable[str]) -> int | None:
    for name in names:
        with suppress(Exception):  # a property may do anything
            value = getattr(part, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def _parts(sampler: object) -> Iterator[object]:
    """A sampler, the samplers inside it, and the objects that these hold. Data sets are left out,
    because a rank that they name is not that of an order."""
    visited: set[int] = set()
    waiting: list[object] = [sampler]
    while waiting:
        part = waiting.pop(0)
        if id(part) in visited:
            continue
        visited.add(id(part))
        yield part
        if type(part) in CONTAINERS:
            few = part if len(cast(Any, part)) <= MOST_INSIDE else ()
            inside = few.values() if isinstance(few, dict) else cast(Iterable[object], few)
            waiting += [each for each in inside if _may_draw(each)]
        elif part is sampler or _may_draw(part):
            waiting += [value for value in attributes_of(part).values() if not _is_data(value)]


def _may_draw(part: object) -> bool:
    return isinstance(part, Sampler) or (hasattr(part, "__iter__") and not _is_data(part))


def _is_data(part: object) -> bool:
    kinds = (str, bytes, range, torch.Tensor, np.ndarray, torch.nn.Module, ModuleType, type)
    if type(part) in CONTAINERS:
        return False
    return isinstance(part, kinds) or (hasattr(part, "__getitem__") and hasattr(part, "__len__"))


def earlier_draws(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """For every position, how often its id was drawn at earlier positions."""
    by_id = np.argsort(ids, kind="stable")
    first = np.searchsorted(ids[by_id], ids[by_id])
    before = np.empty_like(ids)
    before[by_id] = np.arange(len(ids)) - first
    return before


MOST_BATCHES = 1 << 24
STATEFUL = "torchdata.stateful_dataloader."


def torch_class(thing: object) -> type:
    """The class of a DataLoader or a sampler. Those of torchdata's StatefulDataLoader count as the
    classes of torch that they extend."""
    kind = type(thing)
    return kind.__bases__[0] if kind.__module__.startswith(STATEFUL) else kind


@dataclass(frozen=True, slots=True)
class OwnBatching:
    """How a DataLoader makes its batches."""

    why: str
    """The argument that makes its batches special."""
    source: Any = None
    """Its batch sampler, or its sampler with batch_size=None. None: a stream is iterated."""
    is_of_batches: bool = False
    batch_size: int | None = None
    """Of a stream."""
    drop_last: bool = False

    @classmethod
    def from_loader(cls, loader: DataLoader[Any]) -> "OwnBatching | None":
        """None: it batches single samples in the order of a sampler, or of one stream."""
        batches, streamed = loader.batch_sampler, isinstance(loader.dataset, IterableDataset)
        if batches is None:
            return cls("batch_size=None", None if streamed else loader.sampler)
        if torch_class(batches) is not BatchSampler:
            return cls(f"a batch_sampler ({type(batches).__name__})", batches, True)
        if streamed and loader.num_workers > 0:
            why = f"workers that iterate a stream each (num_workers={loader.num_workers})"
            return cls(why, batch_size=loader.batch_size, drop_last=loader.drop_last)
        return None

    @property
    def refusal(self) -> str:
        """The error message where reuse is wanted."""
        return (
            f"the DataLoader has {self.why}, but reuse mixes samples of different batches: give"
            " single samples (a WebDataset without .batched()), a sampler of single ids and a"
            " batch_size, or reuse=1"
        )

    def arguments(self, drawn: Any) -> dict[str, Any]:
        """The arguments of a DataLoader that serves these draws."""
        if self.source is None:
            return {"batch_size": self.batch_size, "drop_last": self.drop_last}
        if self.is_of_batches:
            return {"batch_sampler": drawn}
        return {"batch_size": None, "sampler": drawn}

    def draw_pass(self, seed: int, pass_index: int) -> list[Any]:
        """The draws of the sampler in a pass."""
        with _begun(self.source, seed, pass_index):
            drawn = list(islice(self.source, MOST_BATCHES + 1))
        if len(drawn) > MOST_BATCHES:
            raise LoaderError(
                f"{self.why} gave more than {MOST_BATCHES} batches, which are all drawn when a pass"
                " begins: let it end, or give an IterableDataset"
            )
        return drawn
