"""The only threads: decode samples ahead of their serve, and make batches ahead of the consumer.

    jobs of a pass -> worker takes a few, a free slot each -> read -> ready --+
         ^                                                                    v
         '-- slots fall free <- batch made (in order) <- batch planned and all its samples ready

Workers prefer making a batch to planning one, and that to decoding. Back-pressure is the free slots
and the number of batches that are planned ahead: no queue, nothing unbounded. Positions are taken
in order, and the reuse buffer never asks for one before all earlier ones had a slot, so waiting
cannot deadlock.

While one pass drains, the workers already decode the next one's first samples into the slots that
fall free (`follow`), so a pass does not begin with an empty buffer. Between two passes nobody waits
for them: they fill what is free and end; `begin` starts new ones.

A Ctrl-C strikes the consumer between any two of its lines, so it holds the lock in `with` blocks
only and waits for its doorbell outside of them (a `Condition` that is struck while it takes its
lock again goes on without it).

A worker's failure reaches the consumer as the original exception, once every batch that does not
need the failed sample was handed out: at the same batch for any number of workers.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaders.errors import PassEnded
from loaders.reuse import Serve

JOIN_SECONDS = 10.0
CHUNK_SECONDS = 0.01
"""A worker takes as many samples at once as take about so long: a lock costs less then."""
MOST_IN_CHUNK = 32
NO_SLOT = -1

Done = Callable[[int], None]
Read = Callable[[Sequence[int], Sequence[int], Done], None]
Make = Callable[[int, Serve, NDArray[np.int64]], Any]


@dataclass(slots=True, eq=False)
class Work:
    """The decoding of one pass: `read(positions, slots, done)` for all of `jobs`, in order.
    It calls `done(position)` as soon as one of them is in its slot."""

    jobs: NDArray[np.int64]
    read: Read
    make: Make
    """`make(index, serve, slots)`: a batch of decoded samples. Called on a worker, like `read`."""
    reuse: int
    resident: bool = False
    """The samples lie in the data set's own memory: `slot_of` is given, and nothing falls free."""
    taken: int = 0
    busy: int = 0
    """Workers that are reading now."""
    error: BaseException | None = None
    slot_of: NDArray[np.int64] = field(init=False)
    ready: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        positions = int(self.jobs.max(initial=-1)) + 1
        self.slot_of = np.full(positions, NO_SLOT, dtype=np.int64)
        self.ready = np.zeros(positions, dtype=bool)

    def release(self, positions: NDArray[np.int64]) -> list[int]:
        if self.resident:
            return []
        slots = self.slot_of[positions].tolist()
        self.slot_of[positions] = NO_SLOT
        return slots


@dataclass(slots=True, eq=False)
class Planned:
    """A batch from its plan until the consumer has it."""

    index: int
    serve: Serve
    started: bool = False
    made: bool = False
    released: bool = False
    batch: Any = None
    error: BaseException | None = None


class Prefetcher:
    """`workers` threads over `slots` slots. One consumer; `close()` when it has gone."""

    def __init__(
        self,
        *,
        slots: int,
        workers: int,
        ahead: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`ahead`: so many batches, one or more, are planned and made before the consumer asks."""
        self._workers = workers
        self._ahead = ahead
        self._clock = clock
        self._free = list(range(slots - 1, -1, -1))
        self._work: Work | None = None
        self._following: Work | None = None
        self._batches: deque[Planned] = deque()
        self._plan: Iterator[tuple[int, Serve]] | None = None
        self._planning = False
        self._consumer = False
        self._waiting = False
        self._stopping = False
        lock = threading.Lock()
        self._something_to_do = threading.Condition(lock)
        self._doorbell = threading.Lock()
        """Held unless somebody rang."""
        self._lock = lock
        self._threads: list[threading.Thread] = []
        self._started = 0
        self.decoded = 0
        self.decode_seconds = 0.0
        """Time that workers spent reading, all together."""
        self.stall_seconds = 0.0
        """Time that the consumer waited."""

    # ---- the consumer's side --------------------------------------------------------------------

    def begin(self, work: Work, plan: Iterator[tuple[int, Serve]] | None = None) -> None:
        """Serve `work` from now on: the one that followed, or another. `plan`: its batches, each
        with its number; workers ask for the next one, one of them at a time."""
        with self._lock:
            if self._following is not work:
                self._forget(self._following)
            self._forget(self._work)
            self._work, self._following = work, None
            self._batches.clear()
            self._plan = plan
            self._consumer = True
            self._start_threads()
            self._something_to_do.notify_all()

    def follow(self, work: Work) -> None:
        """What to decode when the jobs of this pass are all taken."""
        with self._lock:
            self._following = work
            self._something_to_do.notify_all()

    @property
    def all_taken(self) -> bool:
        return self._work is not None and self._work.taken == len(self._work.jobs)

    @property
    def following(self) -> Work | None:
        return self._following

    def plan(self, index: int, serve: Serve) -> None:
        """Make this batch after those that were planned before, once its samples are there."""
        with self._lock:
            self._batches.append(Planned(index, serve))
            self._something_to_do.notify()

    def take(self) -> Any:
        """The next planned batch. The consumer makes it itself if no worker has begun to."""
        while True:
            with self._lock:
                if self._stopping:
                    raise PassEnded(
                        "this pass has ended: the loader began another one; use one iterator at a"
                        " time"
                    )
                if self._batches and self._batches[0].made:
                    return self._hand_out()
                job = self._job_of_the_consumer()
                if job is None:
                    self._waiting = True
                    self._doorbell.acquire(blocking=False)
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
        """What it does rather than wait."""
        if not self._batches:
            return self._batch_to_plan()
        work, first = self._work, self._batches[0]
        job = self._batch_to_make(first)
        if job is None and work and work.error and not work.busy and not first.started:
            raise work.error
        return job

    def _ring(self) -> None:
        if self._doorbell.locked():
            self._doorbell.release()

    def finish(self) -> None:
        """The last batch of the pass was taken: nobody waits until the next `begin`."""
        with self._lock:
            self._consumer = False
            self._forget(self._work)
            self._work = None
            self._something_to_do.notify_all()

    def apart(self, job: Callable[[], object]) -> bool:
        """Have a thread of its own do it if this one is a worker. The collector of garbage runs a
        loader's end on any thread and between any two lines: on a worker that holds a lock, which
        the end would wait for."""
        if threading.current_thread() not in self._threads:
            return False
        threading.Thread(target=job, name="perfect-decode-end", daemon=True).start()
        return True

    def close(self) -> bool:
        """Stop and join the workers; safe to call again. Says whether they have ended: one that
        hangs in a read is not waited for any longer."""
        if self.apart(self.close):
            return False
        with self._lock:
            self._stopping = True
            self._something_to_do.notify_all()
            self._ring()
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(JOIN_SECONDS)
        return not any(thread.is_alive() for thread in self._threads)

    # ---- the workers' side (all of it under the lock, but for reading and making) ----------------

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
        with self._lock:
            while not self._stopping:
                job = self._batch_to_make() or self._batch_to_plan() or self._chunk_to_read()
                if job is not None:
                    self._run(job)
                elif self._consumer:
                    self._something_to_do.wait()
                else:
                    break
            self._started -= 1

    def _run(self, job: Callable[[], None]) -> None:
        """Outside the lock."""
        self._lock.release()
        try:
            job()
        finally:
            self._lock.acquire()

    def _batch_to_make(self, only: Planned | None = None) -> Callable[[], None] | None:
        work = self._work
        if work is None:
            return None
        planned = next((batch for batch in self._batches if not batch.started), None)
        if planned is None or (only is not None and planned is not only):
            return None
        positions = planned.serve.positions
        if not work.ready[positions].all():
            return None
        planned.started = True
        slots = work.slot_of[positions]
        return lambda: self._make(work, planned, slots)

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
            if plan is self._plan:  # else of a pass that has ended: the next one's plan goes on
                self._planned(planned, error)
            self._something_to_do.notify()
            if self._waiting:
                self._ring()

    def _planned(self, planned: tuple[int, Serve] | None, error: BaseException | None) -> None:
        """The plan's next batch, or why there is none."""
        if planned is not None:
            self._batches.append(Planned(*planned))
            return
        self._plan = None
        if error is not None:
            nobody = Serve(np.zeros(0, np.int64), np.zeros(0, np.int64))
            self._batches.append(Planned(-1, nobody, started=True, made=True, error=error))

    def _make(self, work: Work, planned: Planned, slots: NDArray[np.int64]) -> None:
        try:
            planned.batch = work.make(planned.index, planned.serve, slots)
        except BaseException as error:
            planned.error = error
        with self._lock:
            planned.made = True
            # A slot may be read by a batch that was planned earlier and is still being made: slots
            # fall free in the order of the plan.
            for batch in self._batches:
                if not batch.made:
                    break
                if not batch.released:
                    last = batch.serve.serves == work.reuse - 1
                    self._free += work.release(batch.serve.positions[last])
                    batch.released = True
            self._something_to_do.notify_all()
            self._ring()

    def _chunk_to_read(self) -> Callable[[], None] | None:
        for work in (self._work, self._following):
            if work is None or work.error or work.taken == len(work.jobs) or not self._free:
                continue
            mean = self.decode_seconds / self.decoded if self.decoded else CHUNK_SECONDS
            wanted = min(MOST_IN_CHUNK, max(1, int(CHUNK_SECONDS / max(mean, 1e-9))))
            # Leave some for the others, or a short row of free slots is decoded by one worker.
            fair = -(-len(self._free) // self._workers)
            count = min(wanted, fair, len(work.jobs) - work.taken)
            positions = [int(p) for p in work.jobs[work.taken : work.taken + count]]
            slots = [self._free.pop() for _ in positions]
            work.taken += count
            work.busy += 1
            work.slot_of[positions] = slots
            return lambda: self._read(work, positions, slots)
        return None

    def _read(self, work: Work, positions: list[int], slots: list[int]) -> None:
        error, started = None, self._clock()
        try:
            work.read(positions, slots, partial(self._one_done, work))
        except BaseException as raised:
            error = raised
        seconds = self._clock() - started
        with self._lock:
            work.busy -= 1
            # Of a pass that was left meanwhile, or after a failure.
            useless = np.array(positions)[~work.ready[positions]]
            if len(useless):
                self._free += work.release(useless)
                self._something_to_do.notify_all()
            if error is None:
                self.decode_seconds += seconds
                self.decoded += len(positions)
            work.error = work.error or error
            if work.error:
                self._ring()

    def _one_done(self, work: Work, position: int) -> None:
        with self._lock:
            if work is not self._work and work is not self._following:
                return
            work.ready[position] = True
            # A worker that decodes on makes the batch only later: the consumer may do it now.
            first = self._batches[0] if self._batches else None
            if self._waiting and first and work.ready[first.serve.positions].all():
                self._ring()

    def _forget(self, work: Work | None) -> None:
        """What it holds falls free; what is being read does when it was read."""
        if work is not None:
            self._free += work.release(np.flatnonzero(work.ready & (work.slot_of != NO_SLOT)))
