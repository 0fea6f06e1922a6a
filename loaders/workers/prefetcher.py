"""The decoding threads: they decode samples before their serve, and make batches before their turn.

    jobs of a pass -> worker takes a few, a free slot each -> read -> ready --+
         ^                                                                    v
         '-- slots fall free <- batch made (in order) <- batch planned and all its samples ready

A worker makes a batch if it can, else plans the next one, else decodes. Free slots and the number
of planned batches bound the work; there is no queue. Positions are taken in order, and asked for
only after all earlier ones had a slot, so waiting cannot deadlock. While one pass drains, the
first samples of the next are decoded into slots that fall free (`follow`).

If a worker fails, the consumer gets the exception after all batches that do not need the failed
sample, so it gets it at the same batch for any number of workers.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

from loaders.errors import OTHER_ITERATOR, PassEnded
from loaders.order.serve import EMPTY, Serve
from loaders.workers.crew import CrewJob, FoundThing, ThreadCrew
from loaders.workers.decode_work import DecodeWork, WorkProgress
from loaders.workers.precedence import Precedence

CHUNK_SECONDS = 0.01
"""A worker takes as many samples at once as it reads in about this time."""
MOST_IN_CHUNK = 32


@dataclass(slots=True, eq=False)
class PlannedBatch:
    """A batch, from its planning until the consumer takes it."""

    index: int
    serve: Serve
    started: bool = False
    made: bool = False
    released: bool = False
    batch: Any = None
    error: BaseException | None = None


@dataclass(slots=True, eq=False)
class ReadingPace:
    """How quickly the threads of one crew have read samples so far."""

    samples: int = 0
    seconds: float = 0.0
    """The time that all threads together spent reading."""

    def chunk(self, free: int, workers: int) -> int:
        """How many samples a thread reads at once, where so many slots are free."""
        mean = self.seconds / self.samples if self.samples else CHUNK_SECONDS
        wanted = min(MOST_IN_CHUNK, max(1, int(CHUNK_SECONDS / max(mean, 1e-9))))
        # Leave some slots for the other threads, or one would read into all of a few free slots.
        return min(wanted, -(-free // workers))


class Prefetcher:
    """`workers` threads, or else the consumer, fill `slots` slots. The consumer calls `close`."""

    def __init__(
        self, *, slots: int, workers: int, ahead: int = 1, precedence: Precedence | None = None
    ) -> None:
        """`ahead` batches, at least one, are planned and made before the consumer asks for them.
        `precedence`: its loader's; None: always in front."""
        self._crew = ThreadCrew("perfect-decode", workers, precedence)
        self._workers = workers
        self._ahead = ahead
        self._free = list(range(slots - 1, -1, -1))
        self._work: WorkProgress | None = None
        self._following: WorkProgress | None = None
        self._batches: deque[PlannedBatch] = deque()
        self._plan: Iterator[tuple[int, Serve]] | None = None
        self._planning = False
        self.pace = ReadingPace()
        self.is_worker = self._crew.is_worker
        self.close = self._crew.close

    # ---- the consumer's side --------------------------------------------------------------------

    def begin(
        self,
        work: DecodeWork,
        plan: Iterator[tuple[int, Serve]] | None = None,
        followed: DecodeWork | None = None,
    ) -> None:
        """Serve `work` from now on. `plan` gives its batches, each with its number; workers ask for
        the next one, one worker at a time. `followed` is what `follow` was given for the same pass,
        if that is not `work` itself: what was decoded for it stays."""
        with self._crew.lock:
            begun = self._following
            if begun is not None and begun.work is not work and begun.work is not followed:
                self._forget(begun)
                begun = None
            if begun is None:
                begun = WorkProgress(work)
            else:
                # How the pass is served is settled only now.
                begun.work = replace(begun.work, make=work.make, reuse=work.reuse)
            self._forget(self._work)
            self._work, self._following = begun, None
            self._batches.clear()
            self._plan = plan
            self._crew.needed = True
            self._crew.start(self._job_of_a_worker)
            self._crew.idle.notify_all()

    def follow(self, work: DecodeWork) -> None:
        """Decode `work` as soon as the jobs of this pass are all taken."""
        with self._crew.lock:
            self._following = WorkProgress(work)
            self._crew.idle.notify_all()

    @property
    def stall_seconds(self) -> float:
        """The time that the consumer waited."""
        return self._crew.stall_seconds

    @property
    def all_taken(self) -> bool:
        """Whether workers have begun to read all samples of this pass."""
        return self._work is not None and self._work.all_taken

    @property
    def all_read(self) -> bool:
        """Whether they have read them, too."""
        return self._work is not None and self._work.all_taken and not self._work.busy

    def plan(self, index: int, serve: Serve) -> None:
        """Make this batch when its samples are there. Batches are taken as they were planned."""
        with self._crew.lock:
            self._batches.append(PlannedBatch(index, serve))
            self._crew.idle.notify()

    def take(self) -> Any:
        """The next planned batch, which the consumer makes if no worker has begun it."""
        done = self._crew.wait_for(self._made_or_job)
        if done.error:
            raise done.error
        return done.batch

    def _made_or_job(self) -> FoundThing[PlannedBatch] | CrewJob | None:
        """The next batch, or what the consumer does instead of waiting, if there is something."""
        if self._crew.stopping:
            raise PassEnded(OTHER_ITERATOR)
        if not self._batches:
            return self._batch_to_plan()
        progress, first = self._work, self._batches[0]
        if first.made:
            self._crew.idle.notify()
            return FoundThing(self._batches.popleft())
        job = self._batch_to_make(first)
        if job is None and progress and not self._workers and not progress.error:
            job = self._samples_to_read(progress, first)
        if job is None and progress and progress.error and not progress.busy and not first.started:
            raise progress.error
        return job

    def finish(self) -> None:
        """Tell the workers that the last batch was taken: nobody waits until the next `begin`."""
        with self._crew.lock:
            self._crew.needed = False
            self._forget(self._work)
            self._work = None
            self._crew.idle.notify_all()

    # ---- under the lock -------------------------------------------------------------------------

    def _job_of_a_worker(self) -> CrewJob | None:
        return self._batch_to_make() or self._batch_to_plan() or self._chunk_to_read()

    def _batch_to_make(self, only: PlannedBatch | None = None) -> CrewJob | None:
        progress = self._work
        if progress is None:
            return None
        planned = next((batch for batch in self._batches if not batch.started), None)
        if planned is None or (only is not None and planned is not only):
            return None
        if not progress.has(planned.serve.positions):
            return None
        planned.started = True
        slots = progress.slots(planned.serve.positions)
        make = partial(progress.work.make, planned.index, planned.serve, slots)
        return CrewJob(make, partial(self._note_made, progress, planned))

    def _batch_to_plan(self) -> CrewJob | None:
        if self._plan is None or self._planning or len(self._batches) >= self._ahead:
            return None
        self._planning, plan = True, self._plan

        def settle(planned: tuple[int, Serve] | None, error: BaseException | None) -> None:
            """Queue the plan's next batch, or the error that ended the plan."""
            self._planning = False
            self._crew.idle.notify()
            if self._crew.waiting:
                self._crew.bell.ring()
            if plan is not self._plan:
                return  # the plan's pass has ended
            if planned is not None:
                self._batches.append(PlannedBatch(*planned))
                return
            self._plan = None
            if error is not None:
                self._batches.append(PlannedBatch(-1, EMPTY, started=True, made=True, error=error))

        return CrewJob(partial(next, plan, None), settle)

    def _note_made(
        self, progress: WorkProgress, planned: PlannedBatch, made: Any, error: BaseException | None
    ) -> None:
        planned.batch, planned.error, planned.made = made, error, True
        # A batch that was planned earlier and is still being made may read the same slot. So slots
        # fall free in the order of the plan.
        for batch in self._batches:
            if not batch.made:
                break
            if not batch.released:
                last = batch.serve.serves == progress.work.reuse - 1
                self._free += progress.release(batch.serve.positions[last].tolist())
                batch.released = True
        self._crew.idle.notify_all()
        self._crew.bell.ring()

    def _chunk_to_read(self) -> CrewJob | None:
        if self._work is not None and self._work.error:
            return None  # the pass will end, so nothing is read for the next one
        for progress in (self._work, self._following):
            if progress is None or progress.error or progress.all_taken or not self._free:
                continue
            return self._reading(progress, self.pace.chunk(len(self._free), self._workers))
        return None

    def _samples_to_read(self, progress: WorkProgress, first: PlannedBatch) -> CrewJob | None:
        """Where there are no workers: the samples that the next batch still lacks, and no others,
        so that what they draw does not depend on how quick anything is."""
        last = int(first.serve.positions.max(initial=-1))
        missing = progress.work.jobs.up_to(last) - progress.taken
        if first.started or missing <= 0:
            return None
        return self._reading(progress, min(missing, len(self._free)))

    def _reading(self, progress: WorkProgress, count: int) -> CrewJob:
        positions, slots = progress.take(count, self._free)
        progress.busy += 1
        started = perf_counter()

        def settle(_: None, error: BaseException | None) -> None:
            progress.busy -= 1
            # These samples are not ready: the read failed, or the pass was left meanwhile.
            useless = [position for position in positions if position not in progress.ready]
            if freed := progress.release(useless):
                self._free += freed
                self._crew.idle.notify_all()
            if error is None:
                self.pace.seconds += perf_counter() - started
                self.pace.samples += len(positions)
            progress.error = progress.error or error
            if progress.error:
                self._crew.bell.ring()

        read = partial(progress.work.read, positions, slots, partial(self._some_done, progress))
        return CrewJob(read, settle)

    def _some_done(self, progress: WorkProgress, *positions: int) -> None:
        with self._crew.lock:
            if progress is not self._work and progress is not self._following:
                return
            progress.ready.update(positions)
            # This worker goes on decoding and would make the batch only later. The consumer can
            # make it now.
            first = self._batches[0] if self._batches else None
            if self._crew.waiting and first and progress.has(first.serve.positions):
                self._crew.bell.ring()

    def _forget(self, progress: WorkProgress | None) -> None:
        """Free the slots of its samples; those that are being read are freed afterwards."""
        if progress is not None:
            self._free += progress.release([*progress.ready])
