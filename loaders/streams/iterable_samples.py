"""Anything that is iterated, as a stream: torch's `IterableDataset`, WebDataset's pipelines, ...

    has set_epoch(n)                      it is called with the number of the pass
    has state_dict and load_state_dict    its state is the place where a resumed pass goes on
    has neither                           a resumed pass iterates it from its beginning, and skips
    is one of Hugging Face's              the same, and it is split by ranks

One thread of the loader at a time iterates it, in this process. So `get_worker_info()` is None
there, and it gives all its samples.
"""

import copy
import importlib
import inspect
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from loaders.errors import LoaderError, check_at_least_one
from loaders.pixels.decoding import ANYWHERE, Room
from loaders.slots.leaves import as_tensor, leaves_of
from loaders.streams.stream_pass import Place, RawSample, StreamReading, StreamTurn

STRIDE = 16
"""One sample in so many has a place."""


class IterableSamples:
    """The samples that iterating `dataset` gives, as a stream for `ReuseLoader`."""

    def __init__(
        self, dataset: Any, sharded: bool | None = None, samples: int | None = None
    ) -> None:
        """`sharded`, where there are several ranks: whether iterating gives the samples of this
        rank alone (True), or those of all, of which each rank then keeps its own (False).
        `samples`: all ranks together serve so many in a pass. None: as many as there are."""
        if isinstance(dataset, Iterator) and not isinstance(dataset, IterableDataset):
            raise LoaderError(
                f"{type(dataset).__name__} can be iterated once only, but every pass iterates anew:"
                " give an IterableDataset, or any object whose __iter__ begins anew"
            )
        self.dataset: Any = dataset
        self.sharded = sharded
        if samples is not None:
            check_at_least_one("samples", samples)
        self.given = samples

    @property
    def samples(self) -> int | None:
        if self.given is not None:
            return self.given
        if self.sharded:
            return None  # its length may be that of one rank, or of all
        try:
            return len(self.dataset)
        except (TypeError, NotImplementedError):
            return None  # most iterables have no length

    @property
    def is_read_twice(self) -> bool:
        return True

    @property
    def identity(self) -> str:
        return type(self.dataset).__name__

    def check(self, world_size: int) -> None:
        of_huggingface = type(self.dataset).__module__.partition(".")[0] == "datasets"
        if world_size > 1 and self.sharded is None and not of_huggingface:
            kind = type(self.dataset).__name__
            raise LoaderError(
                f"nobody says whether {kind} gives each of {world_size} ranks its own samples: give"
                " IterableSamples(dataset, sharded=True) if iterating it on a rank gives those of"
                " this rank alone, or sharded=False if each rank is to keep its own of all"
            )

    def decode(self, raw: RawSample, room: Room = ANYWHERE) -> Any:
        return raw.data

    def begin(self, turn: StreamTurn, place: Place | None = None, skip: int = 0) -> StreamReading:
        dataset, sharded = self.dataset, self.sharded is True
        if self.sharded is None and turn.world_size > 1:
            distributed = importlib.import_module("datasets.distributed")
            dataset = distributed.split_dataset_by_node(dataset, turn.rank, turn.world_size)
            sharded = True
        step = 1 if sharded else turn.world_size  # every `step`-th sample is this rank's
        resumable, number, asked = _has_state(dataset) and not loses_samples(dataset), 0, 0
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(turn.pass_index)
        if place is not None:
            dataset.load_state_dict(copy.deepcopy(place["state"]))
            number = int(place["number"])
        name, iterator = type(dataset).__name__, iter(dataset)
        begun = False
        """Before its first sample, the state may still be that of the pass before."""
        while True:
            here, is_mine = None, number % step == (turn.rank if step > 1 else 0)
            if is_mine and resumable and begun and asked >= skip and asked % STRIDE == 0:
                here = {"number": number, "state": copy.deepcopy(dataset.state_dict())}
            try:
                sample = next(iterator)
            except StopIteration:
                return
            begun = True
            if is_mine:
                label = f"sample {number} of {name}"
                if asked < skip:
                    yield RawSample(label, None)
                else:
                    yield RawSample(label, sample, here, _mark(sample))
                asked += 1
            number += 1


def _has_state(dataset: Any) -> bool:
    """Whether its state can be asked for. (LitData's wants to be told how many samples it gave.)"""
    if not all(hasattr(dataset, name) for name in ("state_dict", "load_state_dict")):
        return False
    try:
        inspect.signature(dataset.state_dict).bind()
    except TypeError:
        return False
    return True


def _mark(sample: Any) -> str:
    """A short digest of the arrays, words and numbers in a sample. Every sample has one: a stream
    that gives others when a pass is resumed must not be taken for the same."""
    digest = 0
    for leaf in leaves_of(sample):
        value = as_tensor(leaf)
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            digest = zlib.crc32(value.contiguous().view(-1).view(torch.uint8).numpy().data, digest)
        elif isinstance(value, str | bytes):
            digest = zlib.crc32(repr(value).encode(), digest)
    return f"{digest:08x}"


BUFFER = "BufferShuffledExamplesIterable"
ITERABLES = "datasets.iterable_dataset"


def loses_samples(dataset: Any) -> bool:
    """Whether going on from its state would leave out samples: those in its shuffle buffer. It is
    looked for in whatever the data set is made of."""
    known: set[int] = set()
    parts = [dataset]
    while parts:
        part = parts.pop()
        if type(part).__name__ == BUFFER:
            return True
        if id(part) in known or type(part).__module__ != ITERABLES:
            continue
        known.add(id(part))
        for inside in getattr(part, "__dict__", {}).values():
            parts += inside if isinstance(inside, list | tuple) else [inside]
    return False
