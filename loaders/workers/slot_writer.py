"""Puts decoded samples into their slots: cropped where that is done once a pass, or as rows.

The cache is offered what was decoded. What it lends is pointed to, and not copied.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from loaders.blocks import Blocks
from loaders.cache.cache import DecodedCache
from loaders.errors import SampleShapeError
from loaders.pixels.augmentation import Augmentation, Draws, draw_keys, reads_slots
from loaders.pixels.placing import pictures_in_place
from loaders.slots.leaves import Nest, Sample, as_stored, as_tensor, leaves_of, picture_number
from loaders.slots.slab import Slab
from loaders.workers.decode_work import ONCE, Done, PassOrder
from loaders.workers.prefetcher import MOST_IN_CHUNK
from loaders.workers.staging import RowSamples

Job = tuple[int, int, int]
"""A position, the slot that it is read into, and the sample that it has."""


@dataclass(frozen=True, slots=True, eq=False)
class Destination:
    """Where the samples of a pass go, and who is told."""

    order: PassOrder
    slab: Slab
    done: Done


@dataclass(slots=True, eq=False)
class IncomingSample:
    """A sample on its way to its slot."""

    position: int
    slot: int
    sample_id: int
    leaves: list[Any]
    lent: bool = False
    """Whether its memory does not change, so that the slot may point there."""


@dataclass(eq=False)
class SlotWriter:
    """Writes samples into the slots of a slab. Several threads may call it."""

    seed: int
    once: Augmentation | None
    cache: DecodedCache | None
    look: Callable[[Sample], None]
    """It is shown a sample before `once` changes it."""

    def __post_init__(self) -> None:
        self.scratch = Blocks(spare=MOST_IN_CHUNK)
        self._lock = threading.Lock()

    def keep_rows(self, jobs: Sequence[Job], samples: Sequence[Sample], to: Destination) -> bool:
        """Put samples that came as rows into their slots at once, if possible; returns whether."""
        if not isinstance(samples, RowSamples) or self.once is not None or self.cache is not None:
            return False
        positions, slots = [job[0] for job in jobs], [job[1] for job in jobs]
        if not to.slab.write_rows(slots, samples.nest, samples.columns):
            return False
        with self._lock:
            to.order.progress.decoded += len(jobs)
        to.done(*positions)
        return True

    def keep_decoded(self, read: Sequence[tuple[Job, Sample]], to: Destination) -> None:
        """Put decoded samples into their slots, and offer them to the cache."""
        slab = to.slab
        with self._lock:
            to.order.progress.decoded += len(read)
        incoming = []
        for (position, slot, sample_id), sample in read:
            if slab.varies and not slab.fits(sample):
                self._keep_odd((position, slot, sample_id), sample, to)
                to.done(position)
                continue
            try:
                leaves = slab.matching_leaves(sample, sample_id)
            except SampleShapeError as error:
                error.add_note(while_decoding(sample_id, to.order))
                raise
            if self.cache is not None:
                self.cache.offer(sample_id, [as_stored(leaf) for leaf in leaves])
            incoming.append(IncomingSample(position, slot, sample_id, leaves))
        self.keep(incoming, to)

    def _keep_odd(self, job: Job, sample: Sample, to: Destination) -> None:
        """Keep a sample that is nested otherwise than the first one. No cache keeps it."""
        position, slot, sample_id = job
        try:
            number = picture_number(sample)
            if self.once is not None and number is not None:
                self.look(sample)
                nest, leaves = Nest(sample), leaves_of(sample)
                picture = cast(Any, as_tensor(leaves[number]))
                at = np.array([position])
                leaves[number] = self.cropped([picture], [sample_id], at, to.order)[0]
                sample = nest.sample(leaves)
            to.slab.keep_unlike(slot, sample, sample_id)
        except Exception as error:
            error.add_note(while_decoding(sample_id, to.order))
            raise

    def keep(self, incoming: Sequence[IncomingSample], to: Destination) -> None:
        if self.once is not None and incoming:
            number = to.slab.picture_number
            pictures = [as_tensor(sample.leaves[number]) for sample in incoming]
            ids = [sample.sample_id for sample in incoming]
            positions = np.array([sample.position for sample in incoming])
            cropped = self.cropped(cast(Any, pictures), ids, positions, to.order)
            for sample, picture in zip(incoming, cropped, strict=True):
                sample.leaves, sample.lent = list(sample.leaves), False
                sample.leaves[number] = picture
        for sample in incoming:
            put = to.slab.lend if sample.lent else to.slab.write_leaves
            try:
                put(sample.slot, sample.leaves, sample.sample_id)
            except Exception as error:
                error.add_note(while_decoding(sample.sample_id, to.order))
                raise
            to.done(sample.position)

    def cropped(
        self,
        pictures: Sequence[torch.Tensor],
        ids: Sequence[int],
        positions: NDArray[np.int64],
        order: PassOrder,
    ) -> Sequence[torch.Tensor]:
        """Crop pictures with `once`: in one call, where they lie in memory as bytes."""
        once, which = self.once, np.asarray(ids, dtype=np.int64)
        assert once is not None
        serves = order.draws(positions, np.full_like(which, ONCE))
        keys = draw_keys(self.seed, order.pass_index, which, serves)
        if (
            reads_slots(once)
            and (in_place := pictures_in_place(pictures, self.scratch)) is not None
        ):
            return once(cast(Any, in_place), Draws(keys)).unbind()
        return [
            once(picture[None], Draws(keys[n : n + 1]))[0] for n, picture in enumerate(pictures)
        ]


def while_decoding(sample_id: int, order: PassOrder) -> str:
    return f"while decoding sample {sample_id} of pass {order.pass_index}"
