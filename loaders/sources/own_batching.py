"""Batches that a DataLoader makes in a way of its own, served as it makes them.

    batch_sampler=...                    lists of ids: each list is a batch
    batch_size=None                      ids, or whatever its sampler gives: each result is a batch
    a stream, batch_size=None            whatever iterating it gives
    a stream in several workers          each worker iterates it, and their batches take turns

Reuse would mix samples of different batches, so these go with reuse 1 and with nothing that is done
at a serve. What a sampler draws is a function of (seed, pass). A pass that is resumed in its middle
is iterated from its beginning, where the data set is a stream, and skips.
"""

from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from loaders.errors import LoaderError
from loaders.sources.randomness import generators_of, seeded_randomness
from loaders.sources.samplers import SAMPLER_STREAM

MOST_BATCHES = 1 << 24
STATEFUL = "torchdata.stateful_dataloader."


def torchs_class(thing: object) -> type:
    """The class of a DataLoader or a sampler. Those of torchdata's StatefulDataLoader act as the
    classes of torch that they are made from, but for a state of their own."""
    kind = type(thing)
    return kind.__bases__[0] if kind.__module__.startswith(STATEFUL) else kind


@dataclass(frozen=True, slots=True)
class OwnBatching:
    """How a DataLoader batches, as it takes it itself."""

    why: str
    """What of it is its own."""
    source: Any = None
    """Its batch sampler, or the sampler beside batch_size=None. None: a stream is iterated."""
    is_of_batches: bool = False
    batch_size: int | None = None
    """Of a stream."""
    drop_last: bool = False

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> "OwnBatching | None":
        """None: it batches single ids in the order of a sampler, or those of one stream."""
        batches, streamed = loader.batch_sampler, isinstance(loader.dataset, IterableDataset)
        if batches is None:
            return cls("batch_size=None", None if streamed else loader.sampler)
        if torchs_class(batches) is not BatchSampler:
            return cls(f"a batch_sampler ({type(batches).__name__})", batches, True)
        if streamed and loader.num_workers > 0:
            why = f"workers that iterate a stream each (num_workers={loader.num_workers})"
            return cls(why, batch_size=loader.batch_size, drop_last=loader.drop_last)
        return None

    @property
    def refusal(self) -> str:
        """What to say where it does not do."""
        return (
            f"the DataLoader has {self.why}, but reuse mixes samples of different batches: give"
            " single samples (a WebDataset without .batched()), a sampler of single ids and a"
            " batch_size, or reuse=1"
        )

    def arguments(self, drawn: Any) -> dict[str, Any]:
        """The arguments of a DataLoader that serves what was drawn."""
        if self.source is None:
            return {"batch_size": self.batch_size, "drop_last": self.drop_last}
        if self.is_of_batches:
            return {"batch_sampler": drawn}
        return {"batch_size": None, "sampler": drawn}

    def drawn_in(self, seed: int, pass_index: int) -> list[Any]:
        """What the sampler gives in a pass."""
        if (set_epoch := getattr(self.source, "set_epoch", None)) is not None:
            set_epoch(pass_index)
        held = generators_of(self.source)
        with seeded_randomness(seed, SAMPLER_STREAM, pass_index, held=held):
            drawn = list(islice(self.source, MOST_BATCHES + 1))
        if len(drawn) > MOST_BATCHES:
            raise LoaderError(
                f"{self.why} gave more than {MOST_BATCHES} batches, which are all drawn when a pass"
                " begins: let it end, or give an IterableDataset"
            )
        return drawn
