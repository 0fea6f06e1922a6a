"""Which lanes this peer holds: they come, go, and go on from pass to pass. It has no threads.

All lanes have the reader, the cache, the worker processes and the memory for batches of one loader
in common. Rooms of lanes that are let go are for those that come. Data that lie decoded in memory
are served from there. The lock of the crew protects all of this, but for the making of rooms.
"""

import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from loaders.batching.batches import Gathered
from loaders.lanes.held_lanes import HeldLane, LaneProgress, LaneRoom
from loaders.lanes.lane_order import LanePass, LaneWalk
from loaders.order.serve import Residents, Serve
from loaders.pipeline import Pipeline, make_batch
from loaders.slots.slab import Slab
from loaders.workers.decode_work import DecodeWork, Done, PassJobs, PassOrder, WorkProgress


class LaneTable:
    """The lanes that one peer holds, in the order in which they were given."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.held: dict[int, HeldLane] = {}
        self.step = 0
        self.extra_decodes = 0
        """Decodes of samples that were then not served for the first time here."""
        self._pipeline = pipeline
        self._pass: tuple[LanePass, PassOrder] | None = None
        self._following: tuple[LanePass, PassOrder] | None = None
        self._walks: dict[int, LaneWalk] = {}
        self.spare: list[LaneRoom] = []
        """Rooms that lanes have left."""
        self._first_room: LaneRoom | None = None
        """The first room that was made. Others are like it."""
        self._making = threading.Lock()

    def make_room(self, progress: LaneProgress, residents: Residents | None) -> LaneRoom:
        """Make room for the samples of a lane. The first one that is still to be served shows how
        large a slot is. `residents` says who stands in the buffer, if nobody has noted it yet.
        Several threads call it, without the lock of the crew."""
        pipeline, order, slots = self._pipeline, progress.order, progress.of.slots
        with self._making:
            if self._first_room is None:
                jobs = progress.samples.work.jobs
                if residents is not None:
                    jobs = PassJobs.from_residents(residents, len(order))
                # If that sample cannot be read, another one of the share takes its place.
                slabs = pipeline.slabs
                slab = slabs.slab_for(slots, order, *(jobs.some(0, 1) or [0]))
                room = LaneRoom(slab, slabs.maker_of(slab), [*range(slots - 1, -1, -1)])
                self._first_room = room
                return room
            like = self._first_room
        if pipeline.setup.opened.decoded is not None:
            return like
        slab = Slab(like.slab.nest.template, slots, varies=like.slab.varies)
        return LaneRoom(slab, like.maker.for_slab(slab), [*range(slots - 1, -1, -1)])

    def begin(self, of: LanePass, order: PassOrder, step: int) -> None:
        """Serve this pass from `step` on. Lanes that are held stay, with what was decoded ahead."""
        resized = self._pass is not None and self._pass[0].slots != of.slots
        followed = not resized and self._following is not None and self._following[1] is order
        self._pass, self._following, self.step = (of, order), None, step
        self._walks.clear()
        if resized:
            lanes = list(self.held)
            self.clear()
            self.hold(lanes)
            return
        for held in self.held.values():
            coming, held.coming = held.coming, None
            self._leave(held, held.now)
            if coming is not None and followed:
                coming.of, coming.walk = of, LaneWalk(of.plan(held.lane))
                held.now = coming
                continue
            if coming is not None:
                self._leave(held, coming)
            self._enter(held)

    def follow(self, of: LanePass, order: PassOrder) -> None:
        """Say which pass is next: its first samples are decoded where slots are free."""
        self._following = of, order
        for held in self.held.values():
            held.coming = self._coming(held)

    def hold(self, lanes: Sequence[int]) -> None:
        for lane in [lane for lane in self.held if lane not in lanes]:
            self._let_go(self.held.pop(lane))
        self.held = {lane: self.held.get(lane) or self._new(lane) for lane in lanes}
        del self.spare[self._rooms_wanted :]

    def advance(self, step: int) -> None:
        """The steps before `step` of this pass are committed."""
        self.step = step
        for held in self.held.values():
            self.free(held, held.now.retire(step))

    def walk_of(self, lane: int) -> LaneWalk:
        """A walk of this lane, which is not held, that can serve the present step."""
        assert self._pass is not None
        walk = self._walks.get(lane)
        if walk is None or not walk.reaches(self.step):
            walk = self._walks[lane] = LaneWalk(self._pass[0].plan(lane))
        return walk

    def clear(self) -> None:
        """Let all lanes go, and all memory."""
        for held in self.held.values():
            self._let_go(held)
        self.held = {}
        self.spare.clear()

    def settle(self, held: HeldLane, progress: LaneProgress) -> None:
        """Give back what is not needed any more, now that a job for `progress` has ended."""
        if not progress.left:
            self.free(held, progress.retire(self.step))
        elif not progress.busy:
            self._end(held, progress)
        self._settle_room(held)

    def free(self, held: HeldLane, slots: list[int]) -> None:
        if held.room is not None:
            held.room.free += slots

    def settle_in(self, held: HeldLane, room: LaneRoom | None) -> None:
        """Give a lane its room. Another lane may have left one while this one was made: then nobody
        wants that one any more."""
        held.room = held.room or room
        del self.spare[self._rooms_wanted :]

    @property
    def room_bytes(self) -> int:
        """The memory of all slots."""
        rooms = [held.room for held in self.held.values() if held.room is not None]
        return sum(room.slab.nbytes for room in [*rooms, *self.spare])

    def _new(self, lane: int) -> HeldLane:
        held = HeldLane(lane)
        self._enter(held)
        held.coming = self._coming(held)
        return held

    def _enter(self, held: HeldLane) -> None:
        """Serve the present pass of a lane from the present step on."""
        assert self._pass is not None
        held.now = self._progress(held, *self._pass, self.walk_of(held.lane))
        del self._walks[held.lane]

    def _coming(self, held: HeldLane) -> LaneProgress | None:
        if self._following is None:
            return None
        of, order = self._following
        coming = self._progress(held, of, order, LaneWalk(of.plan(held.lane)))
        coming.samples.work = replace(
            coming.samples.work, jobs=PassJobs.whole_pass(len(coming.order))
        )
        coming.next_step = 0
        return coming

    def _progress(
        self, held: HeldLane, of: LanePass, order: PassOrder, walk: LaneWalk
    ) -> LaneProgress:
        """The progress of a lane in a pass, at its beginning. `order` is that of the whole pass."""
        share, decoded = order.strided(held.lane, of.lanes), self._pipeline.setup.opened.decoded

        def read(positions: Sequence[int], slots: Sequence[int], done: Done) -> None:
            assert held.room is not None
            if positions:
                self._pipeline.reader.read(share, held.room.slab, positions, slots, done)

        def make(step: int, serve: Serve, slots: NDArray[np.int64]) -> Gathered:
            assert held.room is not None
            return make_batch(held.room.maker, share, progress.of.reaugment, step, serve, slots)

        rows = None if decoded is None else partial(decoded.rows_of, share)
        work = DecodeWork(PassJobs.whole_pass(0), read, make, of.whole.reuse, rows)
        progress = LaneProgress(of, share, walk, WorkProgress(work))
        return progress

    def _let_go(self, held: HeldLane) -> None:
        held.left = True
        if not held.now.planning:
            self._walks[held.lane] = held.now.walk
        self._leave(held, held.now)
        if held.coming is not None:
            self._leave(held, held.coming)
        self._settle_room(held)

    def _leave(self, held: HeldLane, progress: LaneProgress) -> None:
        progress.left = True
        if not progress.busy:
            self._end(held, progress)

    def _end(self, held: HeldLane, progress: LaneProgress) -> None:
        """Nobody works for `progress` any more, and nobody will."""
        self.extra_decodes += progress.order.progress.decoded - progress.served_fresh
        self.free(held, progress.samples.release([*progress.samples.slot_of]))

    def _settle_room(self, held: HeldLane) -> None:
        if held.left and not held.busy and held.room is not None:
            room, held.room = held.room, None
            fits = self._pass is not None and self._pass[0].slots == len(room.free)
            if fits and len(self.spare) < self._rooms_wanted:
                self.spare.append(room)

    @property
    def _rooms_wanted(self) -> int:
        """So many lanes have no room yet."""
        return sum(held.room is None for held in self.held.values())
