"""Reading samples: several at once where the data set can, and watched for random draws.

The states of the generators are compared before and after some samples. If one has moved, those are
read one by one to find which. A reader that seeds the generators from a sample's number leaves them
in the same state each time: that is no random draw.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from loaders.blocks import Blocks
from loaders.errors import BufferTooSmall, FrozenDraw, LoaderError
from loaders.pixels.crops import Crops
from loaders.pixels.jpegs import Pixels, Room
from loaders.slots.leaves import Chunk, Fetch, Sample
from loaders.slots.slab import Slab
from loaders.sources.datasets import unwrapped
from loaders.sources.randomness import SeededGenerators, generators_of, seeded_randomness
from loaders.workers.staging import as_rows

log = logging.getLogger(__name__)

Many = Callable[[list[int]], Iterable[Sample]]


def read_at_once(many: Many | None, ids: Sequence[int]) -> list[Sample] | None:
    """The samples. None: they are to be read singly, so that whatever fails has its id."""
    if many is None or len(ids) < 2:
        return None
    try:
        together = list(many(list(ids)))
    except Exception:
        log.debug("%d samples could not be read at once, so they are read singly", len(ids))
        return None
    if len(together) != len(ids):
        whose = type(getattr(many, "__self__", many)).__name__
        raise LoaderError(
            f"__getitems__ of {whose} gave {len(together)} samples for {len(ids)} ids: let it give"
            " one for each, in their order, or leave it out"
        )
    return together


SURE = 32
"""After so many samples whose reader seeds the generators itself, no more are read twice."""


class DrawWatch:
    """Watches the generators that reading a data set may draw from."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._seeding = 0
        self.held = generators_of(dataset)
        self.generators = SeededGenerators(self.held)
        self._marks: list[tuple[str, bytes]] = []

    def mark(self) -> None:
        self._marks = self.generators.digests()

    @property
    def moved(self) -> bool:
        """Whether a generator has moved since `mark`."""
        return self.generators.digests() != self._marks

    def refuse_draws(self, ids: Sequence[int]) -> None:
        """Refuse samples whose reading draws by chance: their draws would be served again."""
        for sample_id in ids:
            if self._seeding < SURE and (name := self._drawn_from(sample_id)):
                raise FrozenDraw(
                    f"reading sample {sample_id} of {type(self._dataset).__name__} drew random"
                    f" numbers from {name}, and this draw would be served several times: give what"
                    " is random as augment=, or give reuse=1 and no cache; or reaugment=False, if"
                    " every serve of a pass may repeat its draw"
                )

    def _drawn_from(self, sample_id: int) -> str:
        """The generator that reading a sample draws from by chance. Empty: none."""
        begun, ended = [], []
        for seed in (0, 1):
            self.generators.seed(seed, sample_id)
            begun.append(self.generators.digests())
            self._dataset[sample_id]
            ended.append(self.generators.digests())
        moved = [name for (name, was), now in zip(begun[0], ended[0], strict=True) if now[1] != was]
        both = zip(*ended, strict=True)
        by_chance = {name for (name, first), (_, second) in both if first != second}
        self._seeding += bool(moved) and not by_chance.intersection(moved)
        return next((name for name in moved if name in by_chance), "")


class DirectReads:
    """Reads the samples of a data set on the calling thread."""

    def __init__(self, dataset: Any, scratch: Blocks, watched: bool) -> None:
        """`watched`: no other thread reads, so that whatever draws random numbers is found."""
        base, self._rows = unwrapped(dataset)
        self._dataset = dataset
        self._many: Many | None = getattr(base, "__getitems__", None)
        self.read_into: Callable[[int, Room], Sample] | None = getattr(base, "read_into", None)
        """Decodes into memory that is given, where the data set can."""
        self._scaled: bool = getattr(base, "scaled", False)
        """Whether a picture that was decoded whole has other bits."""
        self._watch = DrawWatch(dataset) if watched else None
        self.at_once = watched or self._many is not None
        """Whether reading several samples at once is cheaper."""
        self.first: dict[int, Sample] = {}
        """Samples that were read to show their size. They are not read again."""
        self._scratch = scratch
        self._most = 0
        """The bytes of the largest picture so far."""

    def borrow(self) -> AbstractContextManager[Fetch]:
        return nullcontext(self._fetch)

    def decode_into(
        self, slab: Slab, slot: int, sample_id: int, crops: Crops | None
    ) -> Sample | None:
        """Decode a sample straight into its slot. None: it must be read like any other."""
        picture = slab.picture
        if self.read_into is None or picture is None:
            return None
        if sample_id in self.first and not self._scaled:
            return None
        try:
            memory = partial(picture.rows.room, slot) if crops is None else self._memory
            room = Room(memory, crops, self._memory)
            return self.read_into(self._of_base([sample_id])[0], room)
        except BufferTooSmall:
            raise
        except Exception:
            if crops is not None:
                crops.part = None  # it will be read again, and whole
            return None

    def _fetch(self, ids: Sequence[int], _keys: Sequence[int], frozen: bool) -> Chunk:
        """Read samples. Threads share the generators, so none is seeded."""
        if self._watch is None:
            return self._read(ids)
        if frozen:
            self._watch.mark()
        chunk = self._read(ids)
        chunk = replace(chunk, samples=as_rows(chunk.samples))
        if frozen and self._watch.moved:
            with seeded_randomness(held=self._watch.held):
                try:
                    self._watch.refuse_draws(ids)
                except FrozenDraw as error:
                    return Chunk([], error)
        return chunk

    def _read(self, ids: Sequence[int]) -> Chunk:
        try:
            if (together := read_at_once(self._many, self._of_base(ids))) is not None:
                return Chunk(together)
        except LoaderError as error:
            return Chunk([], error)
        samples: list[Sample] = []
        for sample_id in ids:
            try:
                samples.append(self._read_sample(sample_id))
            except Exception as error:
                return Chunk(samples, error)
        return Chunk(samples)

    def _read_sample(self, sample_id: int) -> Sample:
        if self.first and (first := self.first.pop(sample_id, None)) is not None:
            return first
        if self.read_into is None:
            return self._dataset[sample_id]
        return self.read_into(self._of_base([sample_id])[0], Room(self._memory))

    def _of_base(self, ids: Sequence[int]) -> list[int]:
        return list(ids) if self._rows is None else self._rows[list(ids)].tolist()

    def _memory(self, shape: Sequence[int]) -> Pixels:
        """Memory that was used before, for fresh memory costs page faults."""
        count = prod(shape)
        self._most = max(self._most, count)
        memory = self._scratch.array((self._most,), np.dtype(np.uint8))
        return memory[:count].reshape(shape)
