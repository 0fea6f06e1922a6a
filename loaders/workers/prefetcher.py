"""The decoding threads: they decode samples before their serve, and make batches before their turn.

    jobs of a pass -> worker takes a few, a free slot each -> read -> ready --+
         ^                                                                    v
         '-- slots fall free <- batch made (in order) <- batch planned and all its samples ready

A worker makes a batch if it can, else plans the next one, else decodes. Back-pressure comes from
the free slots and from the number of batches that are planned ahead: there is no queue, and nothing
grows without bound. Positions are taken in order, and the reuse buffer asks for a position only
after all earlier ones had a slot, so waiting cannot deadlock.

While one pass drains, the workers already decode the first samples of the next pass into the slots
that fall free (`follow`), so that a pass does not begin with an empty buffer. Between two passes
nobody waits for the workers: they fill the free slots and end, and `begin` starts new ones. While
the loader is behind, they begin only what the workers of other loaders leave room for.

A Ctrl-C may strike the consumer between any two of its lines. So it holds the lock in `with` blocks
only, and waits for its doorbell outside of them: a `Condition` whose `wait` is struck while it
takes its lock again would go on without the lock.

If a worker fails, the consumer gets the original exception after all batches that do not need the
failed sample, so it gets it at the same batch for any number of workers.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaders.errors import OTHER_ITERATOR, PassEnded
from loaders.order.serve import EMPTY, Serve
from loaders.workers.decode_work import DecodeWork, WorkProgress
from loaders.workers.precedence import Attendance, Precedence, everyone

JOIN_SECONDS = 10.0
CHUNK_SECONDS = 0.01
"""A worker takes as many samples at once as it reads in about this time, so that the lock costs
little."""
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


class Prefetcher:
    """`workers` threads that fill `slots` slots for one consumer, which calls `close` at the
    end. Without workers the consumer does all of it, when it asks for a batch."""

    def __init__(
        self,
        *,
        slots: int,
        workers: int,
        ahead: int = 1,
        clock: Callable[[], float] = time.perf_counter,
        precedence: Precedence | None = None,
    ) -> None:
        """`ahead` batches, at least one, are planned and made before the consumer asks for them.
        `precedence`: its loader's; None: always in front."""
        self._precedence = precedence or Precedence()
        self._workers = workers
        self._ahead = ahead
        self._clock = clock
        self._free = list(range(slots - 1, -1, -1))
        self._work: WorkProgress | None = None
        self._following: WorkProgress | None = None
        self._batches: deque[PlannedBatch] = deque()
        self._plan: Iterator[tuple[int, Serve]] | None = None
        self._planning = False
        self._consumer = False
        self._waiting = False
        self._stopping = False
        lock = threading.Lock()
        self._something_to_do = threading.Condition(lock)
        self._doorbell = threading.Lock()
        """It is locked unless somebody rang. The consumer waits by locking it again."""
        self._lock = lock
        self._threads: list[threading.Thread] = []
        self._started = 0
        self.decoded = 0
        self.decode_seconds = 0.0
        """The time that all workers together spent reading."""
        self.stall_seconds = 0.0
        """The time that the consumer waited."""

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
        with self._lock:
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
            self._consumer = True
            self._start_threads()
            self._something_to_do.notify_all()

    def follow(self, work: DecodeWork) -> None:
        """Decode `work` as soon as the jobs of this pass are all taken."""
        with self._lock:
            self._following = WorkProgress(work)
            self._something_to_do.notify_all()

    @property
    def all_taken(self) -> bool:
        """Whether workers have begun to read all samples of this pass."""
        return self._work is not None and self._work.all_taken

    def plan(self, index: int, serve: Serve) -> None:
        """Make this batch when its samples are there. The consumer gets it after those that were
        planned before."""
        with self._lock:
            self._batches.append(PlannedBatch(index, serve))
            self._something_to_do.notify()

    def take(self) -> Any:
        """The next planned batch. If no worker has begun to make it, the consumer does so
        itself."""
        while True:
            with self._lock:
                if self._stopping:
                    raise PassEnded(OTHER_ITERATOR)
                if self._batches and self._batches[0].made:
                    return self._hand_out()
                job = self._job_of_the_consumer()
                if job is None:
                    self._waiting = True
                    self._doorbell.acquire(blocking=False)
                    if self._precedence.behind:
                        everyone.tell()  # it is in front as long as somebody waits
            if job is not None:
                job()
                continue
            started = self._clock()
            self._doorbell.acquire()
            self._waiting = False
            self.stall_seconds += self._clock() - started

    def _hand_out(self) -> Any:
        done = self._batches.popleft()
        if self._plan is not None:
            self._something_to_do.notify()
        if done.error:
            raise done.error
        return done.batch

    def _job_of_the_consumer(self) -> Callable[[], None] | None:
        """What the consumer does instead of waiting, if there is something."""
        if not self._batches:
            return self._batch_to_plan()
        progress, first = self._work, self._batches[0]
        job = self._batch_to_make(first)
        if job is None and progress and not self._workers and not progress.error:
            job = self._samples_to_read(progress, first)
        if job is None and progress and progress.error and not progress.busy and not first.started:
            raise progress.error
        return job

    def _ring(self) -> None:
        if self._doorbell.locked():
            self._doorbell.release()

    def finish(self) -> None:
        """Tell the workers that the last batch was taken: nobody waits until the next `begin`."""
        with self._lock:
            self._consumer = False
            self._forget(self._work)
            self._work = None
            self._something_to_do.notify_all()

    def run_off_worker(self, job: Callable[[], object]) -> bool:
        """If this thread is a worker, run `job` on a new thread; returns whether it did. The
        garbage collector may close a loader on any thread and between any two lines: also on a
        worker that holds the lock which closing needs."""
        if threading.current_thread() not in self._threads:
            return False
        threading.Thread(target=job, name="perfect-decode-end", daemon=True).start()
        return True

    def close(self) -> bool:
        """Stop and join the workers; returns whether all have ended. A worker that hangs in a read
        is waited for JOIN_SECONDS only. It is safe to call this again."""
        if self.run_off_worker(self.close):
            return False
        with self._lock:
            self._stopping = True
            self._something_to_do.notify_all()
            self._ring()
        everyone.tell()
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(JOIN_SECONDS)
        return not any(thread.is_alive() for thread in self._threads)

    # ---- the workers' side (under the lock, except for reading and making) -----------------------

    def _start_threads(self) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        while self._started < self._workers:
            thread = threading.Thread(
                target=self._serve_jobs, name=f"perfect-decode-{self._started}", daemon=True
            )
            self._started += 1
            self._threads.append(thread)
            thread.start()

    def _serve_jobs(self) -> None:
        with Attendance(self._workers) as attendance, self._lock:
            while not self._stopping:
                if not attendance.begins(self._gives_way):
                    self._run(attendance.wait)
                    continue
                job = self._batch_to_make() or self._batch_to_plan() or self._chunk_to_read()
                if job is not None:
                    self._run(job)
                    continue
                attendance.rests()
                if not self._consumer:
                    break
                self._something_to_do.wait()
            self._started -= 1

    def _gives_way(self) -> bool:
        return self._precedence.behind and not self._waiting

    def _run(self, job: Callable[[], None]) -> None:
        """Run `job` without the lock, which this thread holds before and after."""
        self._lock.release()
        try:
            job()
        finally:
            self._lock.acquire()

    def _batch_to_make(self, only: PlannedBatch | None = None) -> Callable[[], None] | None:
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
        return lambda: self._make(progress, planned, slots)

    def _batch_to_plan(self) -> Callable[[], None] | None:
        if self._plan is None or self._planning or len(self._batches) >= self._ahead:
            return None
        self._planning = True
        return partial(self._plan_next, self._plan)

    def _plan_next(self, plan: Iterator[tuple[int, Serve]]) -> None:
        planned, error = None, None
        try:
            planned = next(plan, None)
        except BaseException as raised:
            error = raised
        with self._lock:
            self._planning = False
            if plan is self._plan:  # otherwise the plan's pass has ended
                self._planned(planned, error)
            self._something_to_do.notify()
            if self._waiting:
                self._ring()

    def _planned(self, planned: tuple[int, Serve] | None, error: BaseException | None) -> None:
        """Queue the plan's next batch, or the error that ended the plan."""
        if planned is not None:
            self._batches.append(PlannedBatch(*planned))
            return
        self._plan = None
        if error is not None:
            self._batches.append(PlannedBatch(-1, EMPTY, started=True, made=True, error=error))

    def _make(
        self, progress: WorkProgress, planned: PlannedBatch, slots: NDArray[np.int64]
    ) -> None:
        try:
            planned.batch = progress.work.make(planned.index, planned.serve, slots)
        except BaseException as error:
            planned.error = error
        with self._lock:
            planned.made = True
            # A batch that was planned earlier and is still being made may read the same slot. So
            # slots fall free in the order of the plan.
            for batch in self._batches:
                if not batch.made:
                    break
                if not batch.released:
                    last = batch.serve.serves == progress.work.reuse - 1
                    self._free += progress.release(batch.serve.positions[last].tolist())
                    batch.released = True
            self._something_to_do.notify_all()
            self._ring()

    def _chunk_to_read(self) -> Callable[[], None] | None:
        if self._work is not None and self._work.error:
            return None  # the pass will end, so nothing is read for the next one
        for progress in (self._work, self._following):
            if progress is None or progress.error or progress.all_taken or not self._free:
                continue
            mean = self.decode_seconds / self.decoded if self.decoded else CHUNK_SECONDS
            wanted = min(MOST_IN_CHUNK, max(1, int(CHUNK_SECONDS / max(mean, 1e-9))))
            # Leave some slots for the other workers, or one worker would decode into all of a few
            # free slots.
            fair = -(-len(self._free) // self._workers)
            positions, slots = progress.take(min(wanted, fair), self._free)
            progress.busy += 1
            return lambda: self._read(progress, positions, slots)
        return None

    def _samples_to_read(
        self, progress: WorkProgress, first: PlannedBatch
    ) -> Callable[[], None] | None:
        """Where there are no workers: the samples that the next batch still lacks, and no others,
        so that what they draw does not depend on how quick anything is."""
        last = int(first.serve.positions.max(initial=-1))
        missing = progress.work.jobs.up_to(last) - progress.taken
        if first.started or missing <= 0:
            return None
        positions, slots = progress.take(min(missing, len(self._free)), self._free)
        progress.busy += 1
        return lambda: self._read(progress, positions, slots)

    def _read(self, progress: WorkProgress, positions: list[int], slots: list[int]) -> None:
        error, started = None, self._clock()
        try:
            progress.work.read(positions, slots, partial(self._some_done, progress))
        except BaseException as raised:
            error = raised
        seconds = self._clock() - started
        with self._lock:
            progress.busy -= 1
            # These samples are not ready: the read failed, or the pass was left meanwhile.
            useless = [position for position in positions if position not in progress.ready]
            if freed := progress.release(useless):
                self._free += freed
                self._something_to_do.notify_all()
            if error is None:
                self.decode_seconds += seconds
                self.decoded += len(positions)
            progress.error = progress.error or error
            if progress.error:
                self._ring()

    def _some_done(self, progress: WorkProgress, *positions: int) -> None:
        with self._lock:
            if progress is not self._work and progress is not self._following:
                return
            progress.ready.update(positions)
            # This worker goes on decoding and would make the batch only later. The consumer can
            # make it now.
            first = self._batches[0] if self._batches else None
            if self._waiting and first and progress.has(first.serve.positions):
                self._ring()

    def _forget(self, progress: WorkProgress | None) -> None:
        """Free the slots of its samples. The slots that are being read into are freed when they
        were read."""
        if progress is not None:
            self._free += progress.release([*progress.ready])
