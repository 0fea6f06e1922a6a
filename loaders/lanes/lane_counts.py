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
        self._ages = 0.0
        """The sum of the ages of all serves of the latest pass that were taken here."""
        self._served = 0

    def took(self, progress: LaneProgress, gathered: Gathered) -> None:
        """Count a batch that the consumer took."""
        info, stats = gathered.info, self.stats
        if progress.counted_step == info.batch_index:
            return
        progress.counted_step = info.batch_index
        if info.pass_index != self._pass:
            self._pass, self._ages, self._served = info.pass_index, 0.0, 0
        ages = info.batch_index - progress.walk.first_step[info.positions]
        self._ages, self._served = self._ages + float(ages.sum()), self._served + len(info.ids)
        first = info.positions[info.serves == 0]
        cached = int(progress.order.progress.cached[first].sum())
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
            mean_age=self._ages / self._served,
            serves=tuple(counts.tolist()),
        )
