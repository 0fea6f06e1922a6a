"""One pass on the consumer's side: take its batches in turn, count.

plan ---- Serve 0, 1, 2, ... ----> Prefetcher: made ahead by its workers ----> take() -> batch
 '-- of a resumed pass the first ones are only counted, so that the rest continues
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaders.device import DeviceFeed
from loaders.engine import Engine
from loaders.errors import PassEnded
from loaders.prefetch import Prefetcher
from loaders.reader import PassOrder
from loaders.reuse import ReuseBuffer, Serve
from loaders.stats import BatchInfo, LoaderStats
from loaders.tuning import Measurement


@dataclass(slots=True, eq=False)
class Replay:
    """A pass as it stands after its first `batches` batches."""

    plan: ReuseBuffer
    serves: Iterator[Serve]
    """Those that are still to come."""
    uses: NDArray[np.int64]
    first_serve: NDArray[np.int64]
    """In which batch a sample was served first; -1: not yet."""
    ages: float = 0.0
    """Of the serves so far: batches since the sample's first one, all together."""
    served: int = 0

    @classmethod
    def of(cls, plan: ReuseBuffer, batches: int) -> "Replay":
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


@dataclass(slots=True, eq=False)
class Taken:
    """A batch, who is in it, the counters with it, what it took, whether it ends the pass."""

    batch: Any
    info: BatchInfo
    stats: LoaderStats
    measured: Measurement
    last: bool


class PassRun:
    """The batches from `first` to the end of a pass."""

    def __init__(
        self,
        engine: Engine,
        pool: Prefetcher,
        order: PassOrder,
        replay: Replay,
        first: int,
        batches: int,
        stats: LoaderStats,
        feed: DeviceFeed | None,
    ) -> None:
        """`stats`: the counters so far."""
        self.pool = pool
        self.order = order
        self._engine = engine
        self._replay = replay
        self._batches = batches
        self._stats = stats
        self._feed = feed
        self._index = first
        self._handed = self._before = stats.decoded
        self._settled = 0
        self._delivered: float | None = None
        self._told = (pool.decode_seconds, pool.decoded)

    def __iter__(self) -> Iterator[Taken]:
        if self._feed is None:
            while self._index < self._batches:
                yield self._hand(self._take())
            return
        under_way: Taken | None = None
        while self._index < self._batches or under_way is not None:
            following = self._take() if self._index < self._batches else None
            if under_way is not None:
                under_way.batch = self._feed.receive(under_way.batch)
                yield self._hand(under_way)
            under_way = following

    def _hand(self, taken: Taken) -> Taken:
        self._handed = taken.stats.decoded
        return taken

    def _take(self) -> Taken:
        if self._engine.pid != os.getpid():
            raise PassEnded("this pass was begun in another process: call iter() again in this one")
        pool, stats, asked = self.pool, self._stats, time.perf_counter()
        stalled = pool.stall_seconds
        gathered = pool.take()
        batch = self._engine.finish(gathered, self._feed)
        info: BatchInfo = gathered.info
        first = info.positions[info.serves == 0]
        cached = int(self.order.cached[first].sum())
        self._replay.count(self._index, info.positions, info.serves)
        counts = np.bincount(info.serves, minlength=len(stats.serves))
        counts[: len(stats.serves)] += np.array(stats.serves, dtype=np.int64)
        stalled = pool.stall_seconds - stalled
        (seconds, decoded), self._told = self._told, (pool.decode_seconds, pool.decoded)
        seconds, decoded = self._told[0] - seconds, self._told[1] - decoded
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
        measured = Measurement(
            decode_seconds=seconds,
            decoded=decoded,
            workers=self._engine.setup.workers,
            step_seconds=0.0 if self._delivered is None else asked - self._delivered,
            stall_seconds=stalled,
            served=len(info.ids),
        )
        self._index += 1
        self._delivered = time.perf_counter()
        last = self._index == self._batches
        return Taken(batch, info, self._stats, measured, last)

    @property
    def whole(self) -> bool:
        """Whether every sample of the pass is served."""
        return self._batches == len(self._replay.plan)

    def extra_decodes(self) -> int:
        """Decodes of this pass beyond its first serves that were not told yet."""
        if self._engine.setup.resident is not None:
            return 0
        extra = self.order.decoded - (self._handed - self._before) - self._settled
        self._settled += extra
        return extra
