"""From a sample's number to its slot: data set or decoded cache, once-a-pass crop, errors.

    cache hit  -> lent, or cropped into the slot                     (no decode)
    miss       -> data set [, worker process] -> cropped or copied into the slot -> offered to the
                  cache

Called by the prefetcher's workers, several at once. With `on_error="skip"` a sample that cannot be
read is replaced by the one half a pass away, the next after it if that fails too, and so on: which
one depends on the order alone, and the two are not alive at the same time in any but a tiny set.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from loaders.augment import Augmentation, Draws, draw_keys
from loaders.cache import DecodedCache
from loaders.errors import DecodeError
from loaders.leaves import Chunk, Fetch, Nest, Sample, as_tensor, leaves_of, own
from loaders.prefetch import Done
from loaders.sources import unwrapped
from loaders.storage import Slab

log = logging.getLogger(__name__)

OnError = Literal["raise", "skip"]

REPLACEMENTS = 10
"""So many samples in a row may be unreadable before the data set is given up."""
ONCE = 1 << 40
"""Stands for the number of the serve in the draws of an augmentation that is drawn once a pass."""


Borrow = Callable[[], AbstractContextManager[Fetch]]


@dataclass(slots=True, eq=False)
class PassOrder:
    """The samples of one pass in the order in which they are decoded."""

    pass_index: int
    ids: NDArray[np.int64]
    cached: NDArray[np.bool_] = field(init=False)
    """Positions that came from the cache."""
    decoded: int = 0
    """Samples that did not."""

    def __post_init__(self) -> None:
        self.cached = np.zeros(len(self.ids), dtype=bool)


class Reader:
    """Gets the samples of a data set into the slots of a slab."""

    def __init__(
        self,
        dataset: Any,
        seed: int,
        once: Augmentation | None,
        on_error: OnError,
        cache: DecodedCache | None,
        borrow: Borrow | None,
    ) -> None:
        """`borrow()` lends what reads samples by their ids (a worker process); without it they are
        read here."""
        self._dataset = dataset
        self._seed = seed
        self._once = once
        self._on_error = on_error
        self._cache = cache
        self._base, self._rows = unwrapped(dataset)
        self._many = getattr(self._base, "__getitems__", None)
        self._borrow: Borrow = borrow or (lambda: nullcontext(self._fetch))
        self._at_once = borrow is not None or self._many is not None
        """Whether reading several samples at once is cheaper."""
        straight = borrow is None and once is None
        self._read_into = getattr(self._base, "read_into", None) if straight else None
        self._lock = threading.Lock()
        self._first: dict[int, Sample] = {}
        self.skipped: dict[int, str] = {}
        """Samples that could not be read, and why."""

    def read(
        self,
        order: PassOrder,
        slab: Slab,
        positions: Sequence[int],
        slots: Sequence[int],
        done: Done,
    ) -> None:
        missed: list[tuple[int, int]] = []
        for position, slot in zip(positions, slots, strict=True):
            sample_id = int(order.ids[position])
            leaves = None if self._cache is None else self._cache.read(sample_id)
            if leaves is None:
                missed.append((position, slot))
                continue
            order.cached[position] = True
            if self._once is None:
                slab.lend(slot, leaves, sample_id)
            else:
                self._keep_leaves(leaves, order, slab, slot, sample_id)
            done(position)
        if self._read_into is not None and slab.interleaved:
            missed = [job for job in missed if not self._straight(order, slab, *job, done)]
        if not missed:
            return
        with self._borrow() as fetch:
            while missed:
                missed = self._read_missed(order, slab, missed, fetch, done)

    def first(self, ids: NDArray[np.int64], pass_index: int) -> Sample:
        """A sample to take the slab's measure of: the first of `ids` that can be read."""
        order = PassOrder(pass_index, ids[:1].copy() if self._on_error == "raise" else ids.copy())
        with self._borrow() as fetch:
            chunk = fetch([int(ids[0])])
            sample_id = int(ids[0])
            if chunk.error is None:
                sample = chunk.samples[0]
                self._first[sample_id] = own(sample)
            else:
                sample, sample_id = self._instead(order, 0, chunk.error, fetch)
            if self._once is None:
                return own(sample)
            leaves = [as_tensor(leaf) for leaf in leaves_of(sample)]
            picture = next(n for n, leaf in enumerate(leaves) if getattr(leaf, "ndim", 0) >= 2)
            return Nest(sample).sample(self._crop(leaves, picture, order, sample_id))

    # ---- misses ---------------------------------------------------------------------------------

    def _read_missed(
        self,
        order: PassOrder,
        slab: Slab,
        missed: list[tuple[int, int]],
        fetch: Fetch,
        done: Done,
    ) -> list[tuple[int, int]]:
        """Reads up to the first sample that cannot be read, sees to that one, gives the rest."""
        ids = [int(order.ids[position]) for position, _ in missed]
        chunk = fetch(ids if self._at_once else ids[:1])
        for sample, sample_id, (position, slot) in zip(chunk.samples, ids, missed, strict=False):
            self._keep(sample, order, slab, slot, sample_id)
            done(position)
        if chunk.error is None:
            return missed[len(chunk.samples) :]
        position, slot = missed[len(chunk.samples)]
        sample, sample_id = self._instead(order, position, chunk.error, fetch)
        self._keep(sample, order, slab, slot, sample_id)
        done(position)
        return missed[len(chunk.samples) + 1 :]

    def _fetch(self, ids: Sequence[int]) -> Chunk:
        """From the data set, on this thread."""
        if self._many is not None and len(ids) > 1:
            try:
                return Chunk(list(self._many(self._of_base(ids))))
            except Exception:
                log.debug("reading %d samples at once failed; one by one it is", len(ids))
        samples: list[Sample] = []
        for sample_id in ids:
            if sample_id in self._first:
                samples.append(self._first.pop(sample_id))
                continue
            try:
                samples.append(self._dataset[sample_id])
            except Exception as error:
                return Chunk(samples, error)
        return Chunk(samples)

    def _straight(self, order: PassOrder, slab: Slab, position: int, slot: int, done: Done) -> bool:
        """Decode straight into the slot; a sample that cannot be read is left to the others."""
        sample_id, picture = int(order.ids[position]), slab.picture
        if sample_id in self._first or self._read_into is None or picture is None:
            return False
        row = self._of_base([sample_id])[0]
        try:
            sample = self._read_into(row, lambda shape: picture.room(slot, shape))
        except DecodeError:
            return False
        self._keep(sample, order, slab, slot, sample_id)
        done(position)
        return True

    def _keep(
        self, sample: Sample, order: PassOrder, slab: Slab, slot: int, sample_id: int
    ) -> None:
        with self._lock:
            order.decoded += 1
        with _noted(sample_id, order.pass_index):
            if self._once is None:
                slab.write(slot, sample, sample_id)
                if self._cache is not None:
                    self._cache.offer(sample_id, slab.leaves(slot))
                return
            leaves = [as_tensor(leaf) for leaf in leaves_of(sample)]
            if self._cache is not None:
                self._cache.offer(sample_id, leaves)
            self._keep_leaves(leaves, order, slab, slot, sample_id)

    def _instead(
        self, order: PassOrder, position: int, error: BaseException, fetch: Fetch
    ) -> tuple[Sample, int]:
        """The sample that stands in for one that cannot be read."""
        wanted = int(order.ids[position])
        if self._on_error == "raise" or not isinstance(error, Exception):
            error.add_note(f"while decoding sample {wanted} of pass {order.pass_index}")
            raise error
        self._skip(wanted, error)
        samples = len(order.ids)
        for step in range(REPLACEMENTS):
            other = int(order.ids[(position + samples // 2 + step) % samples])
            if other == wanted:
                continue
            chunk = fetch([other])
            if chunk.error is None:
                order.ids[position] = other
                return chunk.samples[0], other
            if isinstance(chunk.error, Exception):
                self._skip(other, chunk.error)
        raise DecodeError(
            f"sample {wanted} cannot be read, nor can the {REPLACEMENTS} that could stand in for"
            f" it; {len(self.skipped)} samples were skipped so far, this one because of"
            f" {self.skipped[wanted]}; repair the data set"
        ) from error

    def _skip(self, sample_id: int, error: Exception) -> None:
        with self._lock:
            if sample_id in self.skipped:
                return
            self.skipped[sample_id] = f"{type(error).__name__}: {error}"
        log.warning("skipped sample %d: %s", sample_id, self.skipped[sample_id])

    def _of_base(self, ids: Sequence[int]) -> list[int]:
        return list(ids) if self._rows is None else self._rows[list(ids)].tolist()

    # ---- drawn once a pass ----------------------------------------------------------------------

    def _keep_leaves(
        self, leaves: Sequence[Any], order: PassOrder, slab: Slab, slot: int, sample_id: int
    ) -> None:
        number = next(n for n, column in enumerate(slab.columns) if column is slab.picture)
        slab.write_leaves(slot, self._crop(list(leaves), number, order, sample_id), sample_id)

    def _crop(self, leaves: list[Any], number: int, order: PassOrder, sample_id: int) -> list[Any]:
        assert self._once is not None
        keys = draw_keys(self._seed, order.pass_index, np.array([sample_id]), np.array([ONCE]))
        leaves[number] = self._once(leaves[number][None], Draws(keys))[0]
        return leaves


@contextmanager
def _noted(sample_id: int, pass_index: int) -> Iterator[None]:
    """Whatever is raised says which sample it was about."""
    try:
        yield
    except Exception as error:
        error.add_note(f"while decoding sample {sample_id} of pass {pass_index}")
        raise
