"""What one peer has served of its lanes, as a loader's counters. A batch counts once a step."""

from dataclasses import replace

import numpy as np

from loaders.batches import Gathered
from loaders.lanes.held_lanes import LaneProgress
from loaders.stats import LoaderStats


class LaneCounts:
    """The counters of one peer. Only its consumer counts."""

    def __init__(self) -> None:
        self.stats = LoaderStats()
        self._pass = -1

    def took(self, progress: LaneProgress, gathered: Gathered) -> None:
        """Count a batch that the consumer took."""
        info, stats = gathered.info, self.stats
        if progress.counted_step == info.batch_index:
            return
        progress.counted_step = info.batch_index
        begins, self._pass = info.pass_index != self._pass, info.pass_index
        first = info.positions[info.serves == 0]
        cached = progress.order.count_cached(first)
        progress.served_fresh += len(first) - cached
        counts = np.bincount(info.serves, minlength=len(stats.serves))
        counts[: len(stats.serves)] += np.array(stats.serves, dtype=np.int64)
        self.stats = replace(
            stats,
            decoded=stats.decoded + len(first) - cached,
            cached=stats.cached + cached,
            reused=stats.reused + len(info.ids) - len(first),
            served=stats.served + len(info.ids),
            serve_seconds=stats.serve_seconds + gathered.seconds,
            serves=tuple(counts.tolist()),
        ).aged(progress.walk.ages(info.batch_index), len(info.ids), begins)
