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
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from loaders.errors import DecodeError, FrozenDraw, LoaderError
from loaders.pixels.augmentation import draw_keys
from loaders.pixels.crops import Crops
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
from loaders.workers.dataset_reads import DirectReads
from loaders.workers.decode_work import READING, Done, PassOrder, PassProgress
from loaders.workers.slot_writer import Destination, IncomingSample, Job, SlotWriter, while_decoding
from loaders.workers.worker_pool import Readers

log = logging.getLogger(__name__)

OnError = Literal["raise", "skip"]

REPLACEMENTS = 10
"""If this many samples in a row are unreadable, the data set is given up."""
MOST_NONES = 100
"""If this many samples in a row are None, nobody knows what a sample looks like."""

Foreseen = Callable[[Sequence[Job]], Sequence[Crops]]
"""What will be seen of each of these pictures."""


class SkippedSamples:
    """The samples that could not be read. They end the pass, or others are served instead."""

    def __init__(self, on_error: OnError) -> None:
        self.reasons: dict[int, str] = {}
        """Why they could not be read, by their ids."""
        self._on_error = on_error
        self._lock = threading.Lock()

    def replace(
        self, order: PassOrder, position: int, error: BaseException, read: Callable[[int], Chunk]
    ) -> tuple[Sample, int]:
        """A sample that replaces an unreadable one, and its id. Raises `error` where none may."""
        (wanted,) = _ids(order, [position])
        if isinstance(error, StopIteration):  # as it is, it would end the loop in silence
            error = DecodeError(f"reading sample {wanted} raised {error!r}: let [i] raise another")
        if self._on_error == "raise" or _ends_pass(error):
            error.add_note(while_decoding(wanted, order))
            raise error
        self._skip(wanted, error)
        count = min(REPLACEMENTS, len(order))
        at = (position + len(order) // 2 + np.arange(count)) % len(order)
        others = [i for i in dict.fromkeys(order.drawn_ids[at].tolist()) if i != wanted]
        for other in others:
            chunk = read(other)
            if chunk.error is None:
                order.progress.replaced[position] = other
                return chunk.samples[0], other
            if _ends_pass(chunk.error):
                chunk.error.add_note(while_decoding(other, order))
                raise chunk.error
            self._skip(other, chunk.error)
        raise DecodeError(
            f"sample {wanted} cannot be read ({self.reasons[wanted]}), nor can the {len(others)}"
            f" that could stand in for it (skipped: {len(self.reasons)}). Repair the data set"
        ) from error

    def _skip(self, sample_id: int, error: BaseException) -> None:
        with self._lock:
            if sample_id in self.reasons:
                return
            self.reasons[sample_id] = f"{type(error).__name__}: {error}"
        log.warning("skipped sample %d: %s", sample_id, self.reasons[sample_id])


def _ends_pass(error: BaseException) -> bool:
    """Whether no other sample may be served instead, because the sample is not at fault."""
    return isinstance(error, FrozenDraw) or not isinstance(error, Exception)


@dataclass(eq=False)
class Reader:
    """Reads the samples of a data set into the slots of a slab."""

    writer: SlotWriter
    source: DirectReads | Readers
    """Lends a function that reads samples, on the calling thread or in a worker."""
    skipped: SkippedSamples
    varies: bool = False
    """Whether samples may be nested otherwise than the first one."""
    frozen: bool = False
    """Whether a read that draws random numbers is refused."""

    def __post_init__(self) -> None:
        direct = self._direct = self.source if isinstance(self.source, DirectReads) else None
        once = self.writer.once
        self._at_once = direct is None or direct.at_once or once is not None
        """Whether reading several samples at once is cheaper."""

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
        writer, cache, direct = self.writer, self.writer.cache, self._direct
        to = Destination(order, slab, done)
        hits: list[IncomingSample] = []
        missed: list[Job] = []
        ids = _ids(order, positions)
        for position, slot, sample_id in zip(positions, slots, ids, strict=True):
            leaves = None if cache is None else cache.read(sample_id)
            if leaves is None:
                missed.append((position, slot, sample_id))
            else:
                order.progress.cached.add(position)
                hits.append(IncomingSample(position, slot, sample_id, leaves, lent=True))
        writer.keep(hits, to)
        expected = _expect(slab, missed, foreseen)
        if direct and direct.read_into and writer.once is None and slab.interleaved:
            jobs, missed = missed, []
            for job, crops in zip(jobs, expected, strict=True):
                sample = direct.decode_into(slab, job[1], job[2], crops)
                if sample is None:
                    missed.append(job)
                else:
                    writer.keep_decoded([(job, sample)], to)
        if missed:
            with self.source.borrow() as fetch:
                while missed:
                    missed = self._read_missed(missed, fetch, foreseen, to)

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
        if self.writer.once is None:
            return sample
        self.writer.look(sample)
        leaves: list[Any] = [as_tensor(leaf) for leaf in leaves_of(sample)]
        number = picture_number(sample)
        if number is None:
            raise LoaderError(
                "once was given, but no part of a sample has two dimensions or more, so there is no"
                " picture to crop: leave once out"
            )
        at = np.array([position])
        leaves[number] = self.writer.cropped([leaves[number]], [sample_id], at, order)[0]
        return Nest(sample).sample(leaves)

    def _first_at(self, order: PassOrder, position: int) -> tuple[Sample, int]:
        """A copy of the sample of a position, and its id."""
        (sample_id,) = _ids(order, [position])
        with self.source.borrow() as fetch:
            chunk = fetch([sample_id], self._keys([sample_id], [position], order), self.frozen)
            if chunk.error is None:
                sample = copy_sample(chunk.samples[0])
                if self._direct is not None:
                    self._direct.first[sample_id] = sample
                return sample, sample_id
            replacement, sample_id = self._replace(order, position, chunk.error, fetch)
            return copy_sample(replacement), sample_id

    def _read_missed(
        self, missed: list[Job], fetch: Fetch, foreseen: Foreseen | None, to: Destination
    ) -> list[Job]:
        """Read samples up to the first unreadable one, and replace that one or raise its error.
        Returns the jobs that are left."""
        together = missed if self._at_once else missed[:1]
        positions, _, ids = zip(*together, strict=True)
        chunk = fetch(ids, self._keys(ids, positions, to.order), self.frozen)
        count = len(chunk.samples)
        if not self.writer.keep_rows(together[:count], chunk.samples, to):
            read = [*zip(together, chunk.samples, strict=False)]
            self.writer.keep_decoded(read, to)
        if chunk.error is None:
            return missed[count:]
        position, slot, _ = missed[count]
        sample, sample_id = self._replace(to.order, position, chunk.error, fetch)
        _expect(to.slab, [(position, slot, sample_id)], foreseen)
        self.writer.keep_decoded([((position, slot, sample_id), sample)], to)
        return missed[count + 1 :]

    def _replace(
        self, order: PassOrder, position: int, error: BaseException, fetch: Fetch
    ) -> tuple[Sample, int]:
        def read(other: int) -> Chunk:
            return fetch([other], self._keys([other], [position], order), self.frozen)

        return self.skipped.replace(order, position, error, read)

    def _keys(self, ids: Sequence[int], positions: Sequence[int], order: PassOrder) -> list[int]:
        """What a worker process seeds by, in case that reading draws random numbers."""
        if self._direct is not None:
            return []
        which = np.asarray(ids, dtype=np.int64)
        serves = order.draws(np.asarray(positions), np.full_like(which, READING))
        return draw_keys(self.writer.seed, order.pass_index, which, serves).tolist()


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
