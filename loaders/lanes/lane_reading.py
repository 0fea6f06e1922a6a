"""Reads samples of lanes into their rooms, and makes batches of them: with one loader's pipeline.

All lanes have the reader, the cache, the worker processes and the memory for batches in common.
Data that lie decoded in memory already are served from there, by one room for all lanes.
"""

import threading
from collections.abc import Sequence
from functools import partial

import numpy as np

from loaders.batches import Gathered
from loaders.lanes.held_lanes import LaneProgress, LaneRoom
from loaders.lanes.lane_order import LanePass, LaneWalk
from loaders.order.serve import Residents, Serve
from loaders.pipeline import Pipeline
from loaders.slots.slab import Slab
from loaders.stats import BatchInfo
from loaders.workers.decode_work import Done, PassJobs
from loaders.workers.pass_order import PassOrder


class LaneReading:
    """What the threads of a crew read and make with. Any of them may call it."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._lock = threading.Lock()
        self._first: LaneRoom | None = None
        """The first room that was made. Others are like it."""

    def progress(self, of: LanePass, order: PassOrder, lane: int, walk: LaneWalk) -> LaneProgress:
        """The progress of a lane in a pass, at its beginning. `order` is that of the whole pass."""
        share = order.every(lane, of.lanes)
        progress = LaneProgress(of, share, walk)
        decoded = self._pipeline.setup.opened.decoded
        if decoded is not None:
            progress.lies_decoded(partial(decoded.rows_of, share))
        return progress

    def room(self, progress: LaneProgress, residents: Residents | None) -> LaneRoom:
        """Room for the samples of a lane. The first one that is still to be served shows how large
        a slot is. `residents` says who stands in the buffer, if nobody has noted it yet."""
        pipeline, order, slots = self._pipeline, progress.order, progress.of.slots
        with self._lock:
            if self._first is None:
                jobs = progress.jobs
                if residents is not None:
                    jobs = PassJobs.after(residents, len(order))
                # If that sample cannot be read, another one of the share takes its place.
                first = jobs.some(0, 1) if jobs is not None else []
                slab = pipeline.slab_for(slots, order, *(first or [0]))
                self._first = LaneRoom(slab, pipeline.maker_of(slab), [*range(slots - 1, -1, -1)])
                return self._first
            like = self._first
        if pipeline.setup.opened.decoded is not None:
            return like
        slab = Slab(like.slab.nest.template, slots, varies=like.slab.varies)
        return LaneRoom(slab, like.maker.over(slab), [*range(slots - 1, -1, -1)])

    def read(
        self,
        room: LaneRoom,
        progress: LaneProgress,
        positions: Sequence[int],
        slots: Sequence[int],
        done: Done,
    ) -> None:
        if positions:
            self._pipeline.reader.read(progress.order, room.slab, positions, slots, done)

    def make(self, room: LaneRoom, progress: LaneProgress, step: int, serve: Serve) -> Gathered:
        """Make as much of a batch as any thread may."""
        order, positions = progress.order, serve.positions
        serves = serve.serves if progress.of.reaugment else np.zeros_like(serve.serves)
        draws, ids = order.draws(positions, serves), order.ids(positions)
        info = BatchInfo(order.pass_index, step, positions, ids, serve.serves, draws)
        return room.maker.make(info, progress.slots(positions))
