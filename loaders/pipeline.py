"""What a loader runs on: reader, slab, batch maker and workers, made when a pass begins.

    PipelineSetup --> Pipeline: Reader -> Slab -> BatchMaker, driven by a Prefetcher's threads
                      SlabMaker: how large the slots of a slab are

A pipeline knows nothing of the loader that made it. So a loader that nobody holds can be collected,
and its pipeline is closed then.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loaders.arguments import Serving
from loaders.batching.batches import BatchMaker, Gathered, each_view
from loaders.batching.device import DeviceFeed, tensors_of
from loaders.batching.joint_parts import JointPart, check_once, joint_parts
from loaders.batching.user_views import WholeSample
from loaders.blocks import Blocks
from loaders.errors import OTHER_ITERATOR, BufferTooSmall, PassEnded
from loaders.opened_dataset import OpenedDataset
from loaders.options import LoaderOptions, SettledWorkers, reading_thread, worker_process
from loaders.order.keyed_permutation import source_order
from loaders.order.reuse import buffered_batches
from loaders.order.serve import Serve
from loaders.pixels.augmentation import crops_of, draw_keys, sides_of
from loaders.pixels.crops import Crops
from loaders.slots.leaves import Sample
from loaders.slots.slab import Slab
from loaders.slots.slot_rows import CropLayout
from loaders.stats import BatchInfo, BufferSize
from loaders.workers.dataset_reads import DirectReads
from loaders.workers.decode_work import DecodeWork, PassJobs, PassOrder
from loaders.workers.precedence import Precedence
from loaders.workers.prefetcher import Prefetcher
from loaders.workers.reader import Foreseen, Reader, SkippedSamples
from loaders.workers.slot_writer import Job, SlotWriter
from loaders.workers.worker_pool import ChangeCrew, Readers, WorkerPool

AHEAD = 2
"""This many batches are made before the consumer asks for them."""
HELD = 2
"""This many batches are with the consumer or on their way to it."""
PROBES = 8
"""This many samples are measured to tell how large a slot must be, where memory is limited."""
MARGIN = 1.25
"""Slots are larger than the largest measured sample by this factor, where the samples differ."""


@dataclass(frozen=True, slots=True)
class PipelineSetup:
    """What a pipeline is made of. It does not change while a loader lives."""

    opened: OpenedDataset
    options: LoaderOptions
    workers: SettledWorkers
    seed: int

    @property
    def varies(self) -> bool:
        """Whether samples may be nested in several ways, as a collate function gets them."""
        return self.options.collate is not None

    @property
    def views(self) -> int:
        """The number of views of a sample that a batch has."""
        return max(1, len(each_view(self.options.augment)))


class SlabMaker:
    """Makes slabs, as large as what passes will show of the samples, and their batch makers."""

    def __init__(
        self, setup: PipelineSetup, reader: Reader, blocks: Blocks, crew: ChangeCrew | None
    ) -> None:
        self.drawn = 1
        """How many serves of a sample differ from each other."""
        self._setup = setup
        self._reader = reader
        self._blocks = blocks
        self._crew = crew
        self._sizes: dict[int, tuple[int, int]] = {}
        """The bytes of a slot and of a sample in a batch, by `drawn`."""
        self._largest: Sample | None = None
        """The largest of the samples that were measured."""
        self._slab_bytes = setup.options.order.buffer_bytes

    def make(self, slots: int, order: PassOrder, first: int) -> BatchMaker:
        """Make a slab for what this pass will show of samples like the one at position `first`, and
        what makes batches of its samples."""
        # If that sample cannot be read, another one takes its place.
        return self._make(self.slab_for(1, order, first), slots, self._slab_bytes)

    def _make(self, example: Slab, slots: int, limit: int | None) -> BatchMaker:
        maker = self.maker_of(example)
        if self._setup.opened.decoded is not None:
            return maker
        template, varies, crops = example.nest.template, self._setup.varies, self._layout(maker)
        return maker.for_slab(Slab(template, slots, limit, varies=varies, crops=crops))

    def fits(self, maker: BatchMaker) -> bool:
        """Whether the slots of a slab hold what this pass will show."""
        held = maker.slab.crops.layout if maker.slab.crops else None
        return held == self._layout(maker)

    def slab_for(self, slots: int, order: PassOrder, first: int) -> Slab:
        """Slots as large as the sample at position `first` needs them."""
        decoded = self._setup.opened.decoded
        if decoded is not None:
            template = self._setup.opened.dataset[int(order.ids(np.array([first]))[0])]
            return Slab(template, len(decoded.columns[0]), decoded=decoded.columns)
        template = self._largest
        if template is None:
            template = self._reader.first(order, first)
        return Slab(template, slots, self._slab_bytes, varies=self._setup.varies)

    def maker_of(self, slab: Slab) -> BatchMaker:
        """What makes batches of the samples in a slab."""
        setup, options, split = self._setup, self._setup.options, self._setup.opened.split

        def keys(info: BatchInfo) -> NDArray[np.uint64]:
            return draw_keys(setup.seed, info.pass_index, info.ids, info.draws)

        augment = options.augment
        if split is not None and slab.picture is not None:
            split = split.for_picture(slab.picture.forms.template)
            augment = split.augment
        elif split is not None and isinstance(split.augment, WholeSample):
            augment = split.augment

        def parts_of(template: Sample) -> tuple[JointPart, ...]:
            if split is not None and options.parts is None:
                return ()
            augments = each_view(augment)
            return joint_parts(template, "augment", augments, options.parts, setup.varies)

        on_device = options.device is not None and options.device.augments
        return BatchMaker(
            slab, augment, options.collate, keys, self._blocks, on_device, parts_of, self._crew
        )

    def _layout(self, maker: BatchMaker) -> CropLayout | None:
        """Which crops of pictures like the first one slots are to hold. None: the picture takes
        less memory, or all of it may be seen."""
        firsts, slab, picture = maker.first_steps, maker.slab, maker.slab.picture
        cached = self._setup.options.cache is not None
        if not firsts or picture is None or cached or not slab.interleaved:
            return None
        sizes, channels = tuple(sides_of(first.size) for first in firsts), picture.shape[2]
        layout = CropLayout(sizes, self.drawn, channels)
        if picture.dtype != torch.uint8:
            return None
        smaller = layout.nbytes <= prod(picture.shape)
        return layout if smaller or self._setup.opened.scaled else None

    def batches_within(self, limit: int, batch_size: int) -> int:
        """How many batches of slots fit into `limit` bytes, beside the batches that are served."""
        if self.drawn not in self._sizes:
            self._sizes[self.drawn] = self._measure()
        slot, served = self._sizes[self.drawn]
        left = self._slab_bytes = limit - (AHEAD + HELD) * batch_size * served
        batches = left // (slot * batch_size) if slot else left
        if batches < 1:
            least = (AHEAD + HELD) * batch_size * served + slot * batch_size
            raise BufferTooSmall(
                f"buffer_bytes {limit} is too small: a sample takes {slot} bytes in the buffer and"
                f" {served} in a batch, so {AHEAD + HELD} batches of {batch_size} under way and one"
                f" in the buffer need {least}; raise buffer_bytes to {least}, or lower batch_size"
            )
        return batches

    def _measure(self) -> tuple[int, int]:
        """Return the bytes of a slot, and those of a sample in a batch."""
        count = len(self._setup.opened.dataset)
        order = PassOrder(0, source_order(count, seed=0, pass_index=0, shuffle=False))
        picked = np.unique(np.linspace(0, count - 1, PROBES).astype(int)).tolist()
        samples: list[Sample] = [self._reader.first(order, i) for i in picked]
        sizes = [self._make(Slab(sample, 1), 1, None).slab.nbytes for sample in samples]
        largest = self._largest = samples[int(np.argmax(sizes))]
        slot = max(sizes) if len(set(sizes)) == 1 else int(max(sizes) * MARGIN)
        slab = Slab(largest, 1)
        slab.write(0, largest, 0)
        first = np.zeros(1, dtype=np.int64)
        info = BatchInfo(0, 0, first, first, first, first)
        made = self.maker_of(slab).make(info, first, first)
        served = sum(tensor.nbytes for tensor in tensors_of(made.columns or []))
        return slot, served or slot * self._setup.views


def make_batch(
    maker: BatchMaker,
    order: PassOrder,
    reaugment: bool,
    index: int,
    serve: Serve,
    slots: NDArray[np.int64],
) -> Gathered:
    """Batch `index` of a pass, out of these slots."""
    serves = serve.serves if reaugment else np.zeros_like(serve.serves)
    draws, ids = order.draws(serve.positions, serves), order.ids(serve.positions)
    info = BatchInfo(order.pass_index, index, serve.positions, ids, serve.serves, draws)
    return maker.make(info, slots, serves)


class Pipeline:
    """Serves the passes of one loader. `close` ends it, and is safe to call again."""

    def __init__(self, setup: PipelineSetup, rank: int, precedence: Precedence) -> None:
        dataset, options, workers = setup.opened.dataset, setup.options, setup.workers
        self.setup = setup
        self.pid = os.getpid()
        self._precedence = precedence
        self.cache = options.cache.open(dataset, rank) if options.cache else None
        self._readers: Readers | None = None
        self._crew: ChangeCrew | None = None
        if workers.kind == "process":
            # What lies decoded in memory is not read by processes.
            read = None if setup.opened.decoded is not None else dataset
            make = partial(worker_process, read, workers, setup.seed)
            self._readers = processes = WorkerPool(make, workers.count)
            self._crew = ChangeCrew(processes, workers.count)
        elif workers.asked.timeout is not None:
            make_thread = partial(reading_thread, dataset, workers.asked.timeout)
            self._readers = WorkerPool(make_thread, workers.count)
        optional = setup.varies
        check = partial(check_once, once=options.once, kinds=options.parts, optional=optional)
        writer = SlotWriter(setup.seed, options.once, self.cache, check)
        source = self._readers or DirectReads(dataset, writer.scratch, workers.count == 0)
        self.reader = Reader(writer, source, SkippedSamples(options.on_error), setup.varies)
        pinned = options.pin_memory and torch.cuda.is_available()
        self.blocks = Blocks((AHEAD + HELD) * setup.views, pinned)
        self.slabs = SlabMaker(setup, self.reader, self.blocks, self._crew)
        self._maker: BatchMaker | None = None
        self.pool: Prefetcher | None = None
        self._followed: tuple[PassOrder, DecodeWork] | None = None

    def start_processes(self) -> None:
        """Start the worker processes that are forked. Call this before any thread of ours runs: a
        fork has no threads, and nobody there lets go of a lock that one of them holds."""
        if self._crew is not None and self.setup.opened.decoded is None:
            self._crew.start_processes()

    def ready_for(
        self, slots: int, order: PassOrder, jobs: PassJobs, ahead: int = AHEAD
    ) -> Prefetcher:
        """The workers, over a slab of `slots` slots. The first of `jobs` shows how large a slot
        is. `ahead` batches are made before the consumer asks for them."""
        decoded = self.setup.opened.decoded
        self.start_processes()
        if self._maker is None or (decoded is None and not self.suits(slots)):
            self.stop()
            self._maker = self.slabs.make(slots, order, *(jobs.some(0, 1) or [0]))
        if self.pool is None:
            workers = self.setup.workers.count
            self.pool = Prefetcher(
                slots=slots, workers=workers, ahead=ahead, precedence=self._precedence
            )
        if self.cache is not None:
            self.cache.refresh()  # other ranks may have written since the last pass
        return self.pool

    def begin(
        self,
        order: PassOrder,
        jobs: PassJobs,
        reuse: int,
        reaugment: bool,
        plan: Iterator[tuple[int, Serve]],
    ) -> None:
        """Serve `jobs` of a pass, which may have been followed before, in `plan`'s batches."""
        pool = self._open_pool()
        followed, self._followed = self._followed, None
        decoded_ahead = followed[1] if followed is not None and followed[0] is order else None
        pool.begin(self._work(order, jobs, reuse, reaugment), plan, decoded_ahead)

    def follow(self, order: PassOrder, reuse: int) -> None:
        """Decode the first samples of this pass as soon as slots fall free."""
        pool = self._open_pool()
        work = self._work(order, PassJobs.whole_pass(len(order)), reuse, True)
        self._followed = order, work
        pool.follow(work)

    def _open_pool(self) -> Prefetcher:
        """The workers that were begun. Another thread may have closed the loader since."""
        if (pool := self.pool) is None:
            raise PassEnded(OTHER_ITERATOR)
        return pool

    def _work(self, order: PassOrder, jobs: PassJobs, reuse: int, reaugment: bool) -> DecodeWork:
        maker, decoded = self._maker, self.setup.opened.decoded
        assert maker is not None
        make = partial(make_batch, maker, order, reaugment)
        if decoded is None:
            foreseen = self._foreseen(order, maker)
            read = partial(self.reader.read, order, maker.slab, foreseen=foreseen)
            return DecodeWork(jobs, order.fed(read) if order.fed else read, make, reuse)
        rows = partial(decoded.rows_of, order)
        return DecodeWork(jobs, lambda _positions, _slots, _done: None, make, reuse, rows)

    def suits(self, slots: int) -> bool:
        """Whether the slab has so many slots, and they hold what this pass will show."""
        maker = self._maker
        return maker is not None and maker.slab.slots == slots and self.slabs.fits(maker)

    def _foreseen(self, order: PassOrder, maker: BatchMaker) -> Foreseen | None:
        """What tells which crops of pictures the slots are to hold. None: pictures."""
        firsts, crops = maker.first_steps, maker.slab.crops
        if crops is None or firsts is None:
            return None
        drawn = crops.layout.serves

        def foreseen(jobs: Sequence[Job]) -> Sequence[Crops]:
            each = np.repeat(np.array(jobs, dtype=np.int64).reshape(-1, 3), drawn, axis=0)
            draws = order.draws(each[:, 0], np.tile(np.arange(drawn), len(jobs)))
            keys = draw_keys(self.setup.seed, order.pass_index, each[:, 2], draws)
            return crops_of(firsts, keys, len(jobs))

        return foreseen

    def finish(self, gathered: Gathered, feed: DeviceFeed | None) -> Any:
        """The batch. With a feed, it is on its way to the device."""
        assert self._maker is not None
        batch = self._maker.finish(gathered)
        if feed is None:
            return batch
        return feed.send(batch, partial(self._maker.augmented_on_device, gathered.info))

    @property
    def bytes_taken(self) -> dict[str, int]:
        """The memory that the pipeline takes, as `LoaderStats` calls it."""
        return {
            "buffer_bytes": self._maker.slab.nbytes if self._maker else 0,
            "batch_bytes": self.blocks.made_bytes,
            "cache_bytes": self.cache.nbytes if self.cache else 0,
        }

    def buffer(self, batch_size: int) -> BufferSize:
        slots = self._maker.slab.slots if self._maker else 0
        return BufferSize(-(-slots // batch_size), self.bytes_taken["buffer_bytes"])

    def prepare(self, serving: Serving, batches: int) -> int:
        """Prepare for a pass that is served like this, before any sample of it is read. Returns how
        many batches of slots the buffer has: `batches`, or as many as its limit allows."""
        repeated = serving.reuse > 1 and serving.reaugment
        self.slabs.drawn = serving.reuse if serving.reaugment else 1
        self.reader.frozen = self.cache is not None or repeated
        order = self.setup.options.order
        limit = order.buffer_bytes
        batches = buffered_batches(order.mode, serving.reuse, batches)
        if limit is None or self.setup.opened.decoded is not None:
            return batches
        return min(batches, self.slabs.batches_within(limit, serving.batch_size))

    def stop(self) -> bool:
        """Stop the workers. What they decoded ahead is lost. Returns whether the rest may be used
        again: none hangs, which might still write into the slab, and none failed."""
        if self.pid != os.getpid():
            # A forked process has no threads of its parent, and must leave the parent's processes
            # and files alone.
            return True
        if self._is_on_own_thread():
            return False  # it would wait for itself; `close` has another thread do that
        pool, self.pool, self._followed = self.pool, None, None
        return pool is None or pool.close()

    def close(self) -> None:
        if os.getpid() != self.pid:
            # A forked process has no threads of its parent, and its locks may be held for ever.
            return
        if self._is_on_own_thread():
            threading.Thread(target=self.close, name="perfect-end", daemon=True).start()
            return
        self.stop()
        if self._crew is not None:
            self._crew.close()
        if self._readers is not None:
            self._readers.close()
        if self.cache is not None:
            self.cache.close()

    def _is_on_own_thread(self) -> bool:
        """Whether the calling thread is the pipeline's: the garbage collector may end a pass on a
        worker, which may hold the locks of what has to end."""
        users = (self.pool, self._crew)
        return any(user is not None and user.is_worker() for user in users)
