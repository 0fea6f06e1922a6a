"""The threads that decode samples and make batches for the lanes held here: one crew for all lanes.

    hold {0, 5} --> planned, read and made ahead, by `workers` threads --> take(5), take(0)
    advance     --> slots of committed steps fall free ------------------> the next step

The consumer is one thread. It makes a batch itself that no thread has begun, and waits for samples.
"""

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from loaders.batching.batches import Gathered
from loaders.errors import LaneError
from loaders.lanes.held_lanes import (
    HeldLane,
    LaneJob,
    LaneProgress,
    LaneRoom,
    job_to_make,
    job_to_plan,
    next_job,
)
from loaders.lanes.lane_table import LaneTable
from loaders.order.serve import Residents, Serve
from loaders.pipeline import Pipeline
from loaders.workers.crew import CrewJob, FoundThing, ThreadCrew
from loaders.workers.precedence import Precedence
from loaders.workers.prefetcher import ReadingPace

Thing = TypeVar("Thing")
Run = Callable[[], Any]
Note = Callable[[Any, BaseException | None], None]
"""Notes what a job has made, or the error that it raised."""


class LaneCrew:
    """`workers` threads for the lanes that one consumer holds. It calls `close` at the end."""

    def __init__(
        self, pipeline: Pipeline, workers: int, ahead: int, precedence: Precedence
    ) -> None:
        """`ahead` batches are made before the consumer asks for them."""
        self.pid = os.getpid()
        self.pipeline = pipeline
        self._workers = workers
        self._ahead = ahead
        self.crew = ThreadCrew("perfect-lanes", workers, precedence)
        self.table = LaneTable(pipeline)
        self._waited_for: HeldLane | None = None
        self.pace = ReadingPace()

    # ---- the consumer's side --------------------------------------------------------------------

    def tell(self, change: Callable[..., None], *arguments: Any) -> None:
        """Change the table, and have the threads look what there is to do."""
        with self.crew.lock:
            change(*arguments)
            self.crew.idle.notify_all()

    @property
    def drains(self) -> bool:
        """Whether some lane has no samples left to read in this pass."""
        with self.crew.lock:
            return any(held.now.all_taken for held in self.table.held.values())

    def hold(self, lanes: Sequence[int]) -> None:
        """Decode these lanes ahead, and no others."""
        self.pipeline.start_processes()
        with self.crew.lock:
            self.table.hold(lanes)
            self.crew.start(self._job_of_a_thread)
            self.crew.idle.notify_all()

    def serve(self, lane: int) -> Serve:
        """What a lane serves at the present step."""
        table = self.table
        held = table.held.get(lane)
        if held is None:
            return table.walk_of(lane).serve(table.step)
        return self._wait(held, lambda: held.now.steps.get(table.step), False).serve

    def take(self, lane: int) -> tuple[HeldLane, Gathered]:
        """The batch of a held lane at the present step."""
        held, step = self.table.held[lane], self.table.step
        made = self._wait(held, lambda: held.now.take(step), True)
        with self.crew.lock:
            self.crew.idle.notify_all()
        if isinstance(made, BaseException):
            raise made
        return held, made

    def _wait(self, held: HeldLane, find: Callable[[], Thing | None], makes: bool) -> Thing:
        """Help with a lane's batch, and wait, until `find` returns what is wanted."""

        def look() -> FoundThing[Thing] | CrewJob | None:
            if self.crew.stopping:
                raise LaneError("this LaneLoader was closed: make another one")
            if (thing := find()) is not None:
                return FoundThing(thing)
            job = job_to_make(held, self.table.step) if makes else None
            job = job or job_to_plan(held, self.table.step)
            if job is not None:
                return self._begin_job(job)
            if held.now.error is not None and not held.now.busy:
                raise held.now.error
            self._waited_for = held
            return None

        try:
            return self.crew.wait_for(look)
        finally:
            self._waited_for = None

    @property
    def room_bytes(self) -> int:
        """The memory of all slots."""
        with self.crew.lock:
            return self.table.room_bytes

    def close(self) -> None:
        """Stop and join the threads. It is safe to call this again."""
        if self.pid != os.getpid():
            return  # a forked process has no threads of its parent
        if self.crew.run_off_worker(self.close):
            return
        self.crew.close()
        with self.crew.lock:
            self.table.clear()

    # ---- jobs (under the lock, except for what they run) -----------------------------------------

    def _job_of_a_thread(self) -> CrewJob | None:
        lanes = list(self.table.held.values())
        job = next_job(lanes, self.table.step, self._waited_for, self._ahead)
        return None if job is None else self._begin_job(job)

    def _begin_job(self, job: LaneJob) -> CrewJob:
        """Note that a job has begun."""
        held, progress = job.held, job.progress
        progress.busy += 1
        kinds = {"plan": self._planning, "make": self._making, "read": self._reading}
        run, note = kinds[job.kind](held, progress, job.step)

        def settle(made: Any, error: BaseException | None) -> None:
            note(made, error)
            progress.busy -= 1
            self.table.settle(held, progress)
            self.crew.idle.notify_all()
            if self._waited_for is held:
                self.crew.bell.ring()

        return CrewJob(run, settle)

    def _planning(self, held: HeldLane, progress: LaneProgress, step: int) -> tuple[Run, Note]:
        progress.planning = True
        table, enters = self.table, progress.next_step is None
        room = held.room or (table.spare.pop() if table.spare else None)

        def run() -> tuple[Serve, Residents | None, LaneRoom]:
            serve = progress.walk.serve(step)
            residents = progress.walk.plan.walk(step)[0] if enters else None
            return serve, residents, room or table.make_room(progress, residents)

        def note(planned: Any, error: BaseException | None) -> None:
            serve, residents, there = planned or (None, None, room)
            table.settle_in(held, there)
            progress.planning = error is not None  # what failed is not tried again
            progress.error = progress.error or error
            if serve is not None and not progress.left:
                progress.note_plan(step, serve, residents)

        return run, note

    def _making(self, held: HeldLane, progress: LaneProgress, step: int) -> tuple[Run, Note]:
        samples, planned = progress.samples, progress.steps[step]
        planned.is_being_made, serve = True, planned.serve

        def run() -> Gathered:
            return samples.work.make(step, serve, samples.slots(serve.positions))

        def note(made: Any, error: BaseException | None) -> None:
            planned.is_being_made, planned.made = False, error or made

        return run, note

    def _reading(self, held: HeldLane, progress: LaneProgress, _: int) -> tuple[Run, Note]:
        assert held.room is not None
        most = self.pace.chunk(len(held.room.free), self._workers)
        positions = progress.begin_reads(most, held.room.free)
        slots = [progress.samples.slot_of[position] for position in positions]

        def run() -> float:
            started, done = time.perf_counter(), partial(self._some_done, held, progress)
            progress.samples.work.read(positions, slots, done)
            return time.perf_counter() - started

        def note(seconds: float | None, error: BaseException | None) -> None:
            self.table.free(held, progress.end_reads(positions))
            progress.error = progress.error or error
            if seconds is not None:
                self.pace.seconds += seconds
                self.pace.samples += len(positions)

        return run, note

    def _some_done(self, held: HeldLane, progress: LaneProgress, *positions: int) -> None:
        with self.crew.lock:
            if progress.left:
                return
            progress.samples.ready.update(positions)
            # This thread goes on reading. The consumer can make its batch now.
            if self._waited_for is held and held.now.may_make(self.table.step):
                self.crew.bell.ring()
