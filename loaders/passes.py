"""One pass as the consumer sees it: it takes the batches in turn, and counts.

plan ---- Serve 0, 1, 2, ... ----> Prefetcher: its workers make them ahead ----> take() -> batch
 '-- the first serves of a resumed pass are only counted, so that the rest continues
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaders.device import DeviceFeed
from loaders.errors import PassEnded
from loaders.order.reuse import ReuseBuffer, Serve
from loaders.order.tuning import BatchMeasurement
from loaders.pipeline import Pipeline
from loaders.stats import BatchInfo, LoaderStats
from loaders.workers.prefetcher import Prefetcher
from loaders.workers.reader import PassOrder


@dataclass(slots=True, eq=False)
class PassReplay:
    """A pass as it stands after its first `batches` batches."""

    plan: ReuseBuffer
    serves: Iterator[Serve]
    """The serves that are still to come."""
    uses: NDArray[np.int64]
    """How often each sample was served."""
    first_serve: NDArray[np.int64]
    """The batch in which each sample was served first; -1: it was not served yet."""
    ages: float = 0.0
    """The sum of the ages of all serves so far. The age of a serve is the number of batches since
    the sample's first serve."""
    served: int = 0

    @classmethod
    def of(cls, plan: ReuseBuffer, batches: int) -> "PassReplay":
        replay = cls(
            plan, iter(plan), np.zeros(plan.samples, np.int64), np.full(plan.samples, -1, np.int64)
        )
        for batch in range(batches):
            serve = next(replay.serves)
            replay.count(batch, serve.positions, serve.serves)
            np.add.at(replay.uses, serve.positions, 1)
        return replay

    def count(self, batch: int, positions: NDArray[np.int64], serves: NDArray[np.int64]) -> None:
        self.first_serve[positions[serves == 0]] = batch
        self.ages += float((batch - self.first_serve[positions]).sum())
        self.served += len(positions)


@dataclass(frozen=True, slots=True, eq=False)
class TakenBatch:
    """A batch that the consumer took."""

    batch: Any
    info: BatchInfo
    stats: LoaderStats
    """The loader's counters, this batch included."""
    measured: BatchMeasurement
    last: bool
    """Whether it is the last batch of the pass."""


@dataclass(frozen=True, slots=True, eq=False)
class PlannedPass:
    """A pass before its next batch, which is number `first`; it ends before batch `batches`."""

    order: PassOrder
    replay: PassReplay
    first: int
    batches: int


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
        self._order = planned.order
        self._replay = planned.replay
        self._batches = planned.batches
        self._stats = stats
        self._feed = feed
        self._index = planned.first
        self._decoded_when_handed = self._decoded_before = stats.decoded
        self._extra_counted = 0
        self._delivery_time: float | None = None
        self._decode_counters = (pool.decode_seconds, pool.decoded)

    def __iter__(self) -> Iterator[TakenBatch]:
        if self._feed is None:
            while self._index < self._batches:
                yield self._hand(self._take())
            return
        under_way: TakenBatch | None = None
        while self._index < self._batches or under_way is not None:
            following = self._take() if self._index < self._batches else None
            if under_way is not None:
                arrived = self._feed.receive(under_way.batch)
                yield self._hand(replace(under_way, batch=arrived))
            under_way = following

    def _hand(self, taken: TakenBatch) -> TakenBatch:
        self._decoded_when_handed = taken.stats.decoded
        return taken

    def _take(self) -> TakenBatch:
        if self._pipeline.pid != os.getpid():
            raise PassEnded(
                "this pass was begun in another process: call iter() again in this process"
            )
        pool, stats, asked = self.pool, self._stats, time.perf_counter()
        stalled = pool.stall_seconds
        gathered = pool.take()
        batch = self._pipeline.finish(gathered, self._feed)
        info: BatchInfo = gathered.info
        first = info.positions[info.serves == 0]
        cached = int(self._order.progress.cached[first].sum())
        self._replay.count(self._index, info.positions, info.serves)
        counts = np.bincount(info.serves, minlength=len(stats.serves))
        counts[: len(stats.serves)] += np.array(stats.serves, dtype=np.int64)
        stalled = pool.stall_seconds - stalled
        (seconds, decoded), self._decode_counters = (
            self._decode_counters,
            (pool.decode_seconds, pool.decoded),
        )
        seconds, decoded = self._decode_counters[0] - seconds, self._decode_counters[1] - decoded
        self._stats = replace(
            stats,
            decoded=stats.decoded + len(first) - cached,
            cached=stats.cached + cached,
            reused=stats.reused + len(info.ids) - len(first),
            served=stats.served + len(info.ids),
            stall_seconds=stats.stall_seconds + stalled,
            serve_seconds=stats.serve_seconds + gathered.seconds,
            decode_seconds=stats.decode_seconds + seconds,
            mean_age=self._replay.ages / self._replay.served,
            serves=tuple(counts.tolist()),
        )
        measured = BatchMeasurement(
            decode_seconds=seconds,
            decoded=decoded,
            workers=self._pipeline.setup.workers.count,
            step_seconds=0.0 if self._delivery_time is None else asked - self._delivery_time,
            stall_seconds=stalled,
            served=len(info.ids),
        )
        self._index += 1
        self._delivery_time = time.perf_counter()
        last = self._index == self._batches
        return TakenBatch(batch, info, self._stats, measured, last)

    @property
    def whole(self) -> bool:
        """Whether the pass is served to its end, and not cut off by a limit."""
        return self._batches == len(self._replay.plan)

    def extra_decodes(self) -> int:
        """The decodes of this pass beyond its first serves, without those that an earlier call
        returned."""
        if self._pipeline.setup.opened.decoded is not None:
            return 0
        extra = (
            self._order.progress.decoded
            - (self._decoded_when_handed - self._decoded_before)
            - self._extra_counted
        )
        self._extra_counted += extra
        return extra
