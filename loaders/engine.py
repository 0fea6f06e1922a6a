"""What a loader runs on: slab, reader, batch maker, workers; made when a pass begins.

    Setup --> Engine: Reader -> Slab -> BatchMaker, driven by a Prefetcher's threads

It knows nothing of the loader that made it, so that a loader which nobody holds can be collected,
and closes it then.
"""

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from loaders.augment import Augmentation, draw_keys
from loaders.batches import AugmentOn, BatchMaker, Collate, Gathered, Transform
from loaders.blocks import Blocks
from loaders.cache import CacheSetup
from loaders.device import DeviceFeed
from loaders.errors import BufferTooSmall
from loaders.leaves import Sample
from loaders.prefetch import Prefetcher, Work
from loaders.processes import StartMethod, WorkerProcesses
from loaders.reader import OnError, PassOrder, Reader
from loaders.reuse import Serve
from loaders.stats import BatchInfo
from loaders.storage import Slab
from loaders.transforms import Split

log = logging.getLogger(__name__)

AHEAD = 2
"""Batches that are made before the consumer asks for them."""
HELD = 2
"""Batches that are with the consumer or on their way to it."""
PROBES = 8
"""Samples whose sizes tell how large a slot must be, where memory is limited."""
MARGIN = 1.25
"""Where they differ, others may be larger still."""

WorkerKind = Literal["thread", "process"]


@dataclass(frozen=True, slots=True)
class Resident:
    """Samples that lie in memory, decoded: nothing needs a slot."""

    columns: tuple[Any, ...]
    rows: NDArray[np.int64] | None
    """Where sample i lies (None: at i)."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What an engine is made of. Does not change while a loader lives."""

    dataset: Any
    augment: Augmentation | Transform | None
    split: Split | None
    """Of the data set's own transform, instead of `augment`."""
    once: Augmentation | None
    collate: Collate | None
    on_error: OnError
    workers: int
    worker_kind: WorkerKind
    start_method: StartMethod | None
    buffer_bytes: int | None
    pin_memory: bool
    augment_on: AugmentOn
    seed: int
    resident: Resident | None
    cache: CacheSetup | None


class Engine:
    """Serves one loader's passes. `close()` when it has gone; safe to call again."""

    def __init__(self, setup: Setup, rank: int) -> None:
        self.setup = setup
        self.pid = os.getpid()
        self.cache = setup.cache.open(setup.dataset, rank) if setup.cache else None
        self._processes = (
            WorkerProcesses(setup.dataset, setup.start_method)
            if setup.worker_kind == "process"
            else None
        )
        self.reader = Reader(
            setup.dataset,
            setup.seed,
            setup.once,
            setup.on_error,
            self.cache,
            self._processes.borrow if self._processes else None,
        )
        self.blocks = Blocks(AHEAD + HELD, setup.pin_memory)
        self.slab: Slab | None = None
        self.pool: Prefetcher | None = None
        self._maker: BatchMaker | None = None
        self._sizes: tuple[int, int] | None = None
        self._largest: Sample | None = None
        self._slab_bytes = setup.buffer_bytes
        self._followed: PassOrder | None = None

    def ready_for(self, slots: int, order: PassOrder, jobs: NDArray[np.int64]) -> Prefetcher:
        """The workers, over a slab of `slots`; the first of `jobs` shows how large one is."""
        if self.slab is None or (self.slab.slots != slots and self.setup.resident is None):
            self.stop()
            # What stands in for a sample that cannot be read is looked for in the whole pass.
            first = int(jobs[0]) if len(jobs) else 0
            self.slab = self._slab(slots, order, np.roll(order.ids, -first))
            self._maker = self._maker_of(self.slab)
        if self.pool is None:
            self.pool = Prefetcher(slots=slots, workers=self.setup.workers, ahead=AHEAD)
        if self.cache is not None:
            self.cache.refresh()  # other ranks have written since
        return self.pool

    def begin(
        self,
        order: PassOrder,
        jobs: NDArray[np.int64],
        reuse: int,
        reaugment: bool,
        plan: Iterator[tuple[int, Serve]],
    ) -> None:
        """Serve `jobs` of a pass (the one that was followed, or another) in `plan`'s batches."""
        assert self.pool is not None
        work = self._work(order, jobs, reuse, reaugment)
        followed = self.pool.following
        if followed is not None and self._followed is order:
            # What was decoded ahead stays; how it is served is settled only now.
            followed.make, followed.reuse = work.make, work.reuse
            work = followed
        self._followed = None
        self.pool.begin(work, plan)

    def follow(self, order: PassOrder, reuse: int) -> None:
        """Decode this pass's first samples as soon as the slots fall free."""
        assert self.pool is not None
        self._followed = order
        self.pool.follow(self._work(order, np.arange(len(order.ids)), reuse, True))

    def _work(self, order: PassOrder, jobs: NDArray[np.int64], reuse: int, reaugment: bool) -> Work:
        slab, maker, resident = self.slab, self._maker, self.setup.resident
        assert slab is not None and maker is not None

        def make(index: int, serve: Serve, slots: NDArray[np.int64]) -> Any:
            serves = serve.serves if reaugment else np.zeros_like(serve.serves)
            draws = order.draws(serve.positions, serves)
            ids = order.ids[serve.positions]
            info = BatchInfo(order.pass_index, index, serve.positions, ids, serve.serves, draws)
            return maker.make(info, slots)

        if resident is None:
            return Work(jobs, partial(self.reader.read, order, slab), make, reuse)
        work = Work(
            np.arange(len(order.ids)), lambda _positions, _slots, _done: None, make, reuse, True
        )
        work.taken = len(order.ids)
        work.slot_of[:] = order.ids if resident.rows is None else resident.rows[order.ids]
        work.ready[:] = True
        return work

    def finish(self, gathered: Gathered, feed: DeviceFeed | None) -> Any:
        """The batch; with a feed, on its way to the device."""
        assert self._maker is not None
        batch = self._maker.finish(gathered)
        if feed is None:
            return batch
        return feed.send(batch, partial(self._maker.augmented_there, gathered.info))

    @property
    def slots(self) -> int:
        return self.slab.slots if self.slab else 0

    def batches_within(self, limit: int, batch_size: int) -> int:
        """How many batches of slots fit into `limit` bytes, beside the batches that are served."""
        if self._sizes is None:
            self._sizes = self._measured()
        slot, served = self._sizes
        left = self._slab_bytes = limit - (AHEAD + HELD) * batch_size * served
        batches = left // (slot * batch_size) if slot else left
        if batches < 1:
            least = (AHEAD + HELD) * batch_size * served + slot * batch_size
            raise BufferTooSmall(
                f"buffer_bytes {limit} is too small: a sample takes {slot} bytes and served"
                f" {served}, so {AHEAD + HELD} batches of {batch_size} under way and one in the"
                f" buffer need {least}; raise buffer_bytes to that, or lower batch_size"
            )
        return batches

    def stop(self) -> None:
        """Stop the workers; what they decoded ahead is lost."""
        if self.pid != os.getpid():
            return  # a fork has no threads of its parent, and no say over its processes and files
        if self.pool is not None:
            if not self.pool.close():
                self.slab = None  # somebody still writes there
            self.pool = None
            self._followed = None

    def close(self) -> None:
        if os.getpid() != self.pid:
            return  # a fork has no threads of its parent, and its locks may be held for ever
        if self.pool is not None and self.pool.apart(self.close):
            return
        self.stop()
        if self._processes is not None:
            self._processes.close()
        if self.cache is not None:
            self.cache.close()

    # ---- measures -------------------------------------------------------------------------------

    def _slab(self, slots: int, order: PassOrder, ids: NDArray[np.int64]) -> Slab:
        resident = self.setup.resident
        if resident is not None:
            template = self.setup.dataset[int(ids[0])]
            return Slab(template, len(resident.columns[0]), resident=resident.columns)
        template = self._largest
        if template is None:
            template = self.reader.first(ids, order.pass_index)
        return Slab(template, slots, self._slab_bytes)

    def _maker_of(self, slab: Slab) -> BatchMaker:
        setup = self.setup

        def keys(info: BatchInfo) -> NDArray[np.uint64]:
            return draw_keys(setup.seed, info.pass_index, info.ids, info.draws)

        augment = setup.augment
        if setup.split is not None and slab.picture is not None:
            split = setup.split.seen(slab.picture.template)
            augment = split.augment
            log.info("%s", split.report)
        return BatchMaker(slab, augment, setup.collate, keys, self.blocks, setup.augment_on)

    def _measured(self) -> tuple[int, int]:
        """Bytes of a slot, and of a sample in a batch."""
        ids = np.arange(len(self.setup.dataset))
        picked = np.unique(np.linspace(0, len(ids) - 1, PROBES).astype(int)).tolist()
        samples: list[Sample] = [self.reader.first(np.roll(ids, -i), 0) for i in picked]
        sizes = [Slab(sample, 1).nbytes for sample in samples]
        largest = self._largest = samples[int(np.argmax(sizes))]
        slot = max(sizes) if len(set(sizes)) == 1 else int(max(sizes) * MARGIN)
        slab = Slab(largest, 1)
        slab.write(0, largest, 0)
        info = BatchInfo(0, 0, *(np.zeros(1, dtype=np.int64) for _ in range(4)))
        made = self._maker_of(slab).make(info, np.zeros(1, dtype=np.int64))
        served = sum(getattr(column, "nbytes", 0) for column in made.columns or [])
        return slot, served or slot
