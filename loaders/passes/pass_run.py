"""One pass as the consumer sees it: it takes the batches in turn, and counts.

plan ---- Serve k, k + 1, ... ----> Prefetcher: its workers make them ahead ----> take() -> batch
 '-- a resumed pass is entered at batch k: who stands in the buffer there is decoded again
"""

import os
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

from loaders.batching.device import DeviceFeed
from loaders.errors import PassEnded
from loaders.order.open_end import ENDLESS
from loaders.order.reuse import ReuseBuffer
from loaders.order.serve import BufferAges, Serve
from loaders.order.tuning import BatchMeasurement
from loaders.pipeline import Pipeline
from loaders.stats import BatchInfo, LoaderStats
from loaders.workers.decode_work import PassJobs
from loaders.workers.prefetcher import Prefetcher
from loaders.workers.reader import PassOrder


@dataclass(frozen=True, slots=True, eq=False)
class TakenBatch:
    """A batch that the consumer took."""

    batch: Any
    info: BatchInfo
    stats: LoaderStats
    """The loader's counters, this batch included."""
    measured: BatchMeasurement | None
    """What a choice of the reuse goes by. None: there is none to be made."""
    last: bool
    """Whether it is the last batch of the pass."""


@dataclass(frozen=True, slots=True, eq=False)
class FailedBatch:
    """Stands for a batch that could not be made."""

    error: Exception


class ServedPass(Generator[Any]):
    """The batches of a pass as a training loop gets them. As with a DataLoader, whoever catches the
    error of a batch may ask for the next one."""

    def __init__(self, batches: Generator[Any]) -> None:
        self._batches = batches

    def send(self, value: None) -> Any:
        batch = self._batches.send(value)
        if isinstance(batch, FailedBatch):
            raise batch.error
        return batch

    def throw(self, *raised: Any) -> Any:
        return self._batches.throw(*raised)

    def close(self) -> None:
        """Leave the pass."""
        self._batches.close()


@dataclass(slots=True, eq=False)
class PassEnding:
    """Before which batch a pass ends. It is known, at the latest, when its last one is planned."""

    batches: int = ENDLESS


@dataclass(frozen=True, slots=True, eq=False)
class PlannedPass:
    """A pass before its next batch, which is number `first`."""

    order: PassOrder
    plan: ReuseBuffer
    jobs: PassJobs
    """What is still to be read."""
    serves: Iterator[tuple[int, Serve]]
    """Its batches from there on, with their numbers."""
    ages: BufferAges
    first: int
    ending: PassEnding

    @classmethod
    def entered(
        cls, plan: ReuseBuffer, order: PassOrder, first: int, batches: int
    ) -> "PlannedPass":
        """The pass, entered before batch `first`, up to batch `batches`."""
        residents, serves = plan.walk(first)
        ages = BufferAges.at_entry(residents, plan.reuse)
        jobs = PassJobs.from_residents(residents, plan.samples)
        numbered = zip(range(first, batches), serves, strict=False)
        return cls(order, plan, jobs, numbered, ages, first, PassEnding(batches))


class PassRun:
    """The batches of a planned pass, one after the other."""

    def __init__(
        self,
        pipeline: Pipeline,
        pool: Prefetcher,
        planned: PlannedPass,
        stats: LoaderStats,
        feed: DeviceFeed | None,
    ) -> None:
        """`stats` are the counters so far."""
        self.pool = pool
        self._pipeline = pipeline
        self._planned = planned
        self._stats = stats
        self._feed = feed
        self._index = planned.first
        self._decoded_when_handed = self._decoded_before = stats.decoded
        self._extra_counted = 0
        self._delivery_time: float | None = None
        self._decode_counters = (pool.pace.seconds, pool.pace.samples)

    def __iter__(self) -> Iterator[TakenBatch]:
        for taken in send_ahead(self._take_batches(), self._feed):
            self._decoded_when_handed = taken.stats.decoded
            yield taken

    def _take_batches(self) -> Iterator[TakenBatch]:
        while self._index < self._planned.ending.batches:
            yield self._take()

    def _take(self) -> TakenBatch:
        if self._pipeline.pid != os.getpid():
            raise other_process_error()
        pool, stats, asked = self.pool, self._stats, time.perf_counter()
        stalled = pool.stall_seconds
        gathered = pool.take()
        batch = self._pipeline.finish(gathered, self._feed)
        info: BatchInfo = gathered.info
        cached = self._planned.order.count_cached(info.positions[info.serves == 0])
        ages = self._planned.ages.count(self._index, info.positions, info.serves)
        stalled = pool.stall_seconds - stalled
        seconds, decoded = self._decode_counters
        self._decode_counters = (pool.pace.seconds, pool.pace.samples)
        seconds, decoded = self._decode_counters[0] - seconds, self._decode_counters[1] - decoded
        counted = stats.with_batch(info, cached, gathered.seconds, ages, begins=self._index == 0)
        self._stats = replace(
            counted,
            stall_seconds=stats.stall_seconds + stalled,
            decode_seconds=stats.decode_seconds + seconds,
        )
        measured = BatchMeasurement(
            decode_seconds=seconds,
            decoded=decoded,
            workers=max(self._pipeline.setup.workers.count, 1),
            step_seconds=0.0 if self._delivery_time is None else asked - self._delivery_time,
            served=len(info.ids),
        )
        self._index += 1
        self._delivery_time = time.perf_counter()
        last = self._index == self._planned.ending.batches
        return TakenBatch(batch, info, self._stats, measured, last)

    @property
    def leaves_room(self) -> bool:
        """Whether all samples are taken of a pass that is served to its end, so that the next one
        may be begun. (With a cache: all are read, or the next pass would not find them there.)"""
        pool = self.pool
        done = pool.all_taken if self._pipeline.cache is None else pool.all_read
        return done and self._planned.ending.batches == len(self._planned.plan)

    def finish(self) -> None:
        """The last batch was taken."""
        self.pool.finish()

    def extra_decodes(self) -> int:
        """The decodes of this pass beyond its first serves, since this was asked last."""
        if self._pipeline.setup.opened.decoded is not None:
            return 0
        served = self._decoded_when_handed - self._decoded_before
        extra = self._planned.order.progress.decoded - served - self._extra_counted
        self._extra_counted += extra
        return extra


def send_ahead(taken: Iterator[TakenBatch], feed: DeviceFeed | None) -> Iterator[TakenBatch]:
    """The batches that were taken. With a feed, each is handed out when the next one is on its way
    to the device."""
    if feed is None:
        yield from taken
        return
    under_way: TakenBatch | None = None
    for following in taken:
        if under_way is not None:
            yield replace(under_way, batch=feed.receive(under_way.batch))
        under_way = following
    if under_way is not None:
        yield replace(under_way, batch=feed.receive(under_way.batch))


def other_process_error() -> PassEnded:
    return PassEnded("this pass was begun in another process: call iter() again in this process")
