"""Batches that a DataLoader makes in its own way. They are served as it makes them.

    batch_sampler=...                    lists of ids: each list is a batch
    batch_size=None                      ids, or whatever its sampler gives: each result is a batch
    a stream, batch_size=None            whatever iterating it gives
    a stream in several workers          each worker iterates it, and their batches take turns

Reuse would mix samples of different batches, so this needs reuse 1. A resumed stream is iterated
from its beginning, and its first batches are skipped.
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
