"""From a sample's number to its slot: the cache or the data set, the crop once a pass, errors.

    cache hit  -> lent, or cropped into the slot                     (no decode)
    miss       -> data set [, worker process] -> cropped or copied into the slot -> offered to the
                  cache

The prefetcher's workers call this, several at once. With `on_error="skip"`, an unreadable sample is
replaced by the one that lies half a pass away, or by one after it: the order alone decides.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, Literal

import numpy as np

from loaders.cache.cache import DecodedCache
from loaders.errors import (
    BufferTooSmall,
    DecodeError,
    FrozenDraw,
    LoaderError,
)
from loaders.pixels.augmentation import Augmentation, draw_keys
from loaders.pixels.crops import Crops
from loaders.pixels.jpegs import Pixels, Room
from loaders.slots.leaves import (
    Chunk,
    Fetch,
    Nest,
    Sample,
    as_tensor,
    copy_sample,
    leaves_of,
    nesting_error,
    picture_number,
)
from loaders.slots.slab import Slab
from loaders.sources.datasets import unwrapped
from loaders.sources.randomness import seeded_randomness
from loaders.workers.dataset_reads import DrawWatch, read_at_once
from loaders.workers.decode_work import Done, PassOrder, PassProgress
from loaders.workers.slot_writer import IncomingSample, Job, SlotWriter, while_decoding
from loaders.workers.staging import as_rows

log = logging.getLogger(__name__)

OnError = Literal["raise", "skip"]

REPLACEMENTS = 10
"""If this many samples in a row are unreadable, the data set is given up."""
MOST_NONES = 100
"""If this many samples in a row are None, nobody knows what a sample looks like."""
READING = 1 << 41
"""Reading that draws random numbers draws as if this were the number of the serve."""


Borrow = Callable[[], AbstractContextManager[Fetch]]
Foreseen = Callable[[Sequence[Job]], Sequence[Crops]]
"""What will be seen of each of these pictures."""


@dataclass(eq=False)
class Reader:
    """Reads the samples of a data set into the slots of a slab."""

    dataset: Any
    seed: int
    once: Augmentation | None
    on_error: OnError
    cache: DecodedCache | None
    borrow: Borrow | None
    """Lends a function that reads samples in a worker. None: the calling thread reads them."""
    look: Callable[[Sample], None] = lambda _: None
    """It is shown a sample before `once` changes it."""
    varies: bool = False
    """Whether samples may be nested otherwise than the first one."""
    watched: bool = False
    """Whether the calling thread is the only one that reads, so that it can tell who drew."""
    frozen: bool = False
    """Whether a read that draws random numbers is refused."""
    skipped: dict[int, str] = field(default_factory=dict[int, str])
    """The samples that could not be read, and why."""

    def __post_init__(self) -> None:
        self._writer = SlotWriter(self.seed, self.once, self.cache, self.look)
        self._base, self._rows = unwrapped(self.dataset)
        self._many = getattr(self._base, "__getitems__", None)
        reads = self.borrow is None
        self._read_into = getattr(self._base, "read_into", None) if reads else None
        self._scaled = getattr(self._base, "scaled", False)
        """Whether a picture that was decoded whole has other bits."""
        self._watch = DrawWatch(self.dataset) if self.watched else None
        self._at_once = bool(self.borrow or self._many or self.once or self.watched)
        """Whether reading several samples at once is cheaper."""
        self._most = 0
        """The bytes of the largest picture so far."""
        self._lock = threading.Lock()
        self._first: dict[int, Sample] = {}

    def read(
        self,
        order: PassOrder,
        slab: Slab,
        positions: Sequence[int],
        slots: Sequence[int],
        done: Done,
        foreseen: Foreseen | None = None,
    ) -> None:
        """`foreseen` tells which crops of pictures the slots are to hold."""
        hits: list[IncomingSample] = []
        missed: list[Job] = []
        ids = _ids(order, positions)
        for position, slot, sample_id in zip(positions, slots, ids, strict=True):
            leaves = None if self.cache is None else self.cache.read(sample_id)
            if leaves is None:
                missed.append((position, slot, sample_id))
            else:
                order.progress.cached.add(position)
                hits.append(IncomingSample(position, slot, sample_id, leaves, lent=True))
        self._writer.keep(hits, order, slab, done)
        expected = _expect(slab, missed, foreseen)
        if self._read_into is not None and self.once is None and slab.interleaved:
            each = zip(missed, expected, strict=True)
            missed = [job for job, seen in each if not self._in_slot(order, slab, job, done, seen)]
        if missed:
            with self._fetching() as fetch:
                while missed:
                    missed = self._read_missed(order, slab, missed, fetch, done, foreseen)

    def first(self, order: PassOrder, position: int) -> Sample:
        """The sample of a position, or its replacement. It shows how large slots must be."""
        order = replace(order, progress=PassProgress())
        sample, sample_id = self._first_at(order, position)
        for other in range(position + 1, position + MOST_NONES) if self.varies else ():
            if sample is not None:
                break
            position = other % len(order)
            sample, sample_id = self._first_at(order, position)
        if sample is None:
            error = nesting_error(None, sample_id, None)
            error.add_note(while_decoding(sample_id, order))
            raise error
        if self.once is None:
            return sample
        self._writer.look(sample)
        leaves: list[Any] = [as_tensor(leaf) for leaf in leaves_of(sample)]
        number = picture_number(sample)
        if number is None:
            raise LoaderError(
                "once was given, but no part of a sample has two dimensions or more, so there is no"
                " picture to crop: leave once out"
            )
        at = np.array([position])
        leaves[number] = self._writer.cropped([leaves[number]], [sample_id], at, order)[0]
        return Nest(sample).sample(leaves)

    def _first_at(self, order: PassOrder, position: int) -> tuple[Sample, int]:
        """A copy of the sample of a position, and its id."""
        (sample_id,) = _ids(order, [position])
        with self._fetching() as fetch:
            chunk = fetch([sample_id], self._keys([sample_id], [position], order), self.frozen)
            if chunk.error is None:
                sample = self._first[sample_id] = copy_sample(chunk.samples[0])
                return sample, sample_id
            replacement, sample_id = self._replacement(order, position, chunk.error, fetch)
            return copy_sample(replacement), sample_id

    def _read_missed(
        self,
        order: PassOrder,
        slab: Slab,
        missed: list[Job],
        fetch: Fetch,
        done: Done,
        foreseen: Foreseen | None,
    ) -> list[Job]:
        """Read samples up to the first unreadable one, and replace that one or raise its error.
        Returns the jobs that are left."""
        together = missed if self._at_once else missed[:1]
        positions, _, ids = zip(*together, strict=True)
        chunk = fetch(ids, self._keys(ids, positions, order), self.frozen)
        count = len(chunk.samples)
        if not self._writer.keep_rows(together[:count], chunk.samples, order, slab, done):
            read = [*zip(together, chunk.samples, strict=False)]
            self._writer.keep_decoded(read, order, slab, done)
        if chunk.error is None:
            return missed[count:]
        position, slot, _ = missed[count]
        sample, sample_id = self._replacement(order, position, chunk.error, fetch)
        _expect(slab, [(position, slot, sample_id)], foreseen)
        self._writer.keep_decoded([((position, slot, sample_id), sample)], order, slab, done)
        return missed[count + 1 :]

    def _keys(self, ids: Sequence[int], positions: Sequence[int], order: PassOrder) -> list[int]:
        """What a worker process seeds by, in case that reading draws random numbers."""
        if self.borrow is None:
            return []
        which = np.asarray(ids, dtype=np.int64)
        serves = order.draws(np.asarray(positions), np.full_like(which, READING))
        return draw_keys(self.seed, order.pass_index, which, serves).tolist()

    def _fetching(self) -> AbstractContextManager[Fetch]:
        return nullcontext(self._fetch) if self.borrow is None else self.borrow()

    def _fetch(self, ids: Sequence[int], _keys: Sequence[int], frozen: bool) -> Chunk:
        """Read on this thread. Threads share the generators, so none is seeded."""
        if self._watch is None:
            return self._read_here(ids)
        if frozen:
            self._watch.mark()
        chunk = self._read_here(ids)
        chunk = replace(chunk, samples=as_rows(chunk.samples))
        if frozen and self._watch.moved:
            with seeded_randomness(held=self._watch.held):
                try:
                    self._watch.refuse_draws(ids)
                except FrozenDraw as error:
                    return Chunk([], error)
        return chunk

    def _read_here(self, ids: Sequence[int]) -> Chunk:
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
        if self._first and (first := self._first.pop(sample_id, None)) is not None:
            return first
        if self._read_into is None:
            return self.dataset[sample_id]
        return self._read_into(self._of_base([sample_id])[0], Room(self._memory))

    def _in_slot(
        self, order: PassOrder, slab: Slab, job: Job, done: Done, crops: Crops | None
    ) -> bool:
        """Decode straight into the slot; returns whether it was. Else `_read_missed` reads it."""
        (_, slot, sample_id), picture = job, slab.picture
        if self._read_into is None or picture is None:
            return False
        if sample_id in self._first and not self._scaled:
            return False
        try:
            memory = partial(picture.rows.room, slot) if crops is None else self._memory
            room = Room(memory, crops, self._memory)
            sample = self._read_into(self._of_base([sample_id])[0], room)
        except BufferTooSmall:
            raise
        except Exception:
            if crops is not None:
                crops.part = None  # it will be read again, and whole
            return False
        self._writer.keep_decoded([(job, sample)], order, slab, done)
        return True

    def _memory(self, shape: Sequence[int]) -> Pixels:
        """Memory that was used before, for fresh memory costs page faults."""
        count = prod(shape)
        self._most = max(self._most, count)
        memory = self._writer.scratch.array((self._most,), np.dtype(np.uint8))
        return memory[:count].reshape(shape)

    def _replacement(
        self, order: PassOrder, position: int, error: BaseException, fetch: Fetch
    ) -> tuple[Sample, int]:
        """A sample that replaces an unreadable one, and its id. Raises `error` where none may."""
        (wanted,) = _ids(order, [position])
        if isinstance(error, StopIteration):  # as it is, it would end the loop in silence
            error = DecodeError(f"reading sample {wanted} raised {error!r}: let [i] raise another")
        if (
            self.on_error == "raise"
            or isinstance(error, FrozenDraw)
            or not isinstance(error, Exception)
        ):
            error.add_note(while_decoding(wanted, order))
            raise error
        self._skip(wanted, error)
        at = (position + len(order) // 2 + np.arange(REPLACEMENTS)) % len(order)
        for other in order.drawn_ids[at].tolist():
            if other == wanted:
                continue
            chunk = fetch([other], self._keys([other], [position], order), self.frozen)
            if chunk.error is None:
                order.progress.replaced[position] = other
                return chunk.samples[0], other
            if isinstance(chunk.error, Exception):
                self._skip(other, chunk.error)
        raise DecodeError(
            f"sample {wanted} cannot be read ({self.skipped[wanted]}), nor can the {REPLACEMENTS}"
            f" that could stand in for it (skipped: {len(self.skipped)}). Repair the data set"
        ) from error

    def _skip(self, sample_id: int, error: Exception) -> None:
        with self._lock:
            if sample_id in self.skipped:
                return
            self.skipped[sample_id] = f"{type(error).__name__}: {error}"
        log.warning("skipped sample %d: %s", sample_id, self.skipped[sample_id])

    def _of_base(self, ids: Sequence[int]) -> list[int]:
        return list(ids) if self._rows is None else self._rows[list(ids)].tolist()


def _expect(slab: Slab, jobs: Sequence[Job], foreseen: Foreseen | None) -> Sequence[Crops | None]:
    """Let the slots of these samples hold their crops, where the slab has room for such."""
    if slab.crops is None or foreseen is None:
        return [None] * len(jobs)
    crops = foreseen(jobs)
    for (_, slot, _), each in zip(jobs, crops, strict=True):
        slab.crops.expect(slot, each)
    return crops


def _ids(order: PassOrder, positions: Sequence[int]) -> list[int]:
    return order.ids(np.asarray(positions, dtype=np.int64)).tolist()
