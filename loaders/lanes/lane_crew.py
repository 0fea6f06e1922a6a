"""The threads that decode samples and make batches for the lanes held here: one crew for all lanes.

    hold {0, 5} --> planned, read and made ahead, by `workers` threads --> take(5), take(0)
    advance     --> slots of committed steps fall free ------------------> the next step

The consumer is one thread. It makes a batch itself that no thread has begun, and waits for samples.
A Ctrl-C may strike it between any two of its lines. So it holds the lock in `with` blocks only, and
waits for its doorbell outside of them, as with a `Prefetcher`.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from loaders.batches import Gathered
from loaders.errors import LaneError
from loaders.lanes.held_lanes import HeldLane, LaneProgress, LaneRoom
from loaders.lanes.lane_jobs import LaneJob, batch_to_make, lane_to_plan, next_job
from loaders.lanes.lane_order import LanePass
from loaders.lanes.lane_reading import LaneReading
from loaders.lanes.lane_table import LaneTable
from loaders.order.serve import Serve
from loaders.workers.pass_order import PassOrder
from loaders.workers.precedence import Attendance, Precedence, everyone
from loaders.workers.prefetcher import CHUNK_SECONDS, JOIN_SECONDS, MOST_IN_CHUNK

Found = TypeVar("Found")


class LaneCrew:
    """`workers` threads for the lanes that one consumer holds. It calls `close` at the end."""

    def __init__(
        self, reading: LaneReading, workers: int, ahead: int, precedence: Precedence
    ) -> None:
        """`ahead` batches are made before the consumer asks for them."""
        self.pid = os.getpid()
        self._reading = reading
        self._workers = workers
        self._ahead = ahead
        self._precedence = precedence
        self._table = LaneTable(reading)
        self._waited_for: HeldLane | None = None
        self._stopping = False
        self._lock = threading.Lock()
        self._something_to_do = threading.Condition(self._lock)
        self._doorbell = threading.Lock()
        """It is locked unless somebody rang. The consumer waits by locking it again."""
        self._threads: list[threading.Thread] = []
        self.decoded = 0
        self.decode_seconds = 0.0
        """The time that all threads together spent reading."""
        self.stall_seconds = 0.0
        """The time that the consumer waited."""

    # ---- the consumer's side --------------------------------------------------------------------

    def begin(self, of: LanePass, order: PassOrder, step: int) -> None:
        """Serve this pass from `step` on. Lanes that are held stay, with what was decoded ahead."""
        with self._lock:
            self._table.begin(of, order, step)
            self._something_to_do.notify_all()

    def follow(self, of: LanePass, order: PassOrder) -> None:
        """Decode the first samples of the next pass where slots are free."""
        with self._lock:
            self._table.follow(of, order)
            self._something_to_do.notify_all()

    @property
    def drains(self) -> bool:
        """Whether some lane has no samples left to read in this pass."""
        with self._lock:
            return any(held.now.all_taken for held in self._table.held.values())

    def hold(self, lanes: Sequence[int]) -> None:
        """Decode these lanes ahead, and no others."""
        with self._lock:
            self._table.hold(lanes)
            self._start_threads()
            self._something_to_do.notify_all()

    @property
    def held(self) -> tuple[int, ...]:
        return tuple(self._table.held)

    def advance(self, step: int) -> None:
        """The steps before `step` of this pass are committed."""
        with self._lock:
            self._table.advance(step)
            self._something_to_do.notify_all()

    def serve(self, lane: int) -> Serve:
        """What a lane serves at the present step."""
        table = self._table
        held = table.held.get(lane)
        if held is None:
            return table.walk_of(lane).serve(table.step)
        return self._wait(held, lambda: held.now.planned.get(table.step), False)

    def take(self, lane: int) -> tuple[HeldLane, Gathered]:
        """The batch of a held lane at the present step."""
        held, step = self._table.held[lane], self._table.step
        found = self._wait(held, lambda: held.now.made.pop(step, None), True)
        with self._lock:
            held.now.taken_step = step
            self._something_to_do.notify_all()
        if isinstance(found, BaseException):
            raise found
        return held, found

    def _wait(self, held: HeldLane, found: Callable[[], Found | None], makes: bool) -> Found:
        """Help with a lane's batch, and wait, until it is `found`."""
        while True:
            with self._lock:
                if self._stopping:
                    raise LaneError("this LaneLoader was closed: make another one")
                if (there := found()) is not None:
                    return there
                job = batch_to_make(held, self._table.step) if makes else None
                job = job or lane_to_plan(held, self._table.step)
                if job is None:
                    error = held.now.error
                    if error is not None and not held.now.busy:
                        raise error
                    self._waited_for = held
                    self._doorbell.acquire(blocking=False)
                    if self._precedence.behind:
                        everyone.tell()  # it is in front as long as somebody waits
                doing = None if job is None else self._begun(job)
            if doing is not None:
                doing()
                continue
            started = time.perf_counter()
            self._doorbell.acquire()
            self._waited_for = None
            self.stall_seconds += time.perf_counter() - started

    @property
    def extra_decodes(self) -> int:
        """Decodes of samples that were then not served for the first time here."""
        return self._table.extra_decodes

    @property
    def room_bytes(self) -> int:
        """The memory of all slots."""
        with self._lock:
            return self._table.room_bytes

    def run_off_worker(self, job: Callable[[], object]) -> bool:
        """If this thread is one of the crew, run `job` on a new thread; returns whether it did. The
        garbage collector may close a loader on any thread and between any two lines."""
        if threading.current_thread() not in self._threads:
            return False
        threading.Thread(target=job, name="perfect-lanes-end", daemon=True).start()
        return True

    def close(self) -> None:
        """Stop and join the threads. It is safe to call this again."""
        if self.pid != os.getpid():
            return  # a forked process has no threads of its parent
        if self.run_off_worker(self.close):
            return
        with self._lock:
            self._stopping = True
            self._something_to_do.notify_all()
            self._ring()
        everyone.tell()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(JOIN_SECONDS)
        with self._lock:
            self._table.clear()

    # ---- the threads' side (under the lock, except for what jobs do) --------------------

    def _start_threads(self) -> None:
        while len(self._threads) < self._workers:
            name = f"perfect-lanes-{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        with Attendance(self._workers) as attendance, self._lock:
            while not self._stopping:
                if not attendance.begins(self._gives_way):
                    self._unlocked(attendance.wait)
                    continue
                lanes = list(self._table.held.values())
                job = next_job(lanes, self._table.step, self._waited_for, self._ahead)
                if job is not None:
                    self._unlocked(self._begun(job))
                    continue
                attendance.rests()
                self._something_to_do.wait()

    def _gives_way(self) -> bool:
        return self._precedence.behind and self._waited_for is None

    def _unlocked(self, job: Callable[[], object]) -> None:
        """Run `job` without the lock, which this thread holds before and after."""
        self._lock.release()
        try:
            job()
        finally:
            self._lock.acquire()

    def _ring(self) -> None:
        if self._doorbell.locked():
            self._doorbell.release()

    # ---- jobs -----------------------------------------------------------------------------------

    def _begun(self, job: LaneJob) -> Callable[[], None]:
        """Note that a job has begun; returns what to do for it without the lock."""
        held, progress = job.held, job.progress
        progress.busy += 1
        if job.kind == "plan":
            progress.planning = True
            left_out = progress.jobs is None or (
                job.step > 0 and job.step - 1 not in progress.planned
            )
            room = held.room or self._table.spare_room()
            return partial(self._plan, held, progress, job.step, left_out, room)
        room = held.room
        assert room is not None
        if job.kind == "make":
            progress.making.add(job.step)
            serve = progress.planned[job.step]
            return partial(self._make, held, progress, room, job.step, serve)
        mean = self.decode_seconds / self.decoded if self.decoded else CHUNK_SECONDS
        wanted = min(MOST_IN_CHUNK, max(1, int(CHUNK_SECONDS / max(mean, 1e-9))))
        # Leave some slots for the other threads, or one would decode into all that are free.
        most = min(wanted, -(-len(room.free) // self._workers))
        positions = progress.next_jobs(most, room.free)
        slots = [progress.slot_of[position] for position in positions]
        return partial(self._read, held, progress, room, positions, slots)

    def _plan(
        self,
        held: HeldLane,
        progress: LaneProgress,
        step: int,
        left_out: bool,
        room: LaneRoom | None,
    ) -> None:
        serve = residents = error = None
        try:
            serve = progress.walk.serve(step)
            residents = progress.walk.residents(step) if left_out else None
            if room is None:
                room = self._reading.room(progress, residents)
        except BaseException as raised:
            error = raised
        with self._lock:
            self._table.settle_in(held, room)
            progress.planning = error is not None  # what failed is not tried again
            if serve is not None and not error and not progress.left:
                self._table.free(held, progress.note_plan(step, serve, residents))
            self._ended(held, progress, error)

    def _make(
        self, held: HeldLane, progress: LaneProgress, room: LaneRoom, step: int, serve: Serve
    ) -> None:
        try:
            made = self._reading.make(room, progress, step, serve)
        except BaseException as error:
            made = error
        with self._lock:
            progress.making.discard(step)
            progress.made[step] = made
            self._ended(held, progress, None)

    def _read(
        self,
        held: HeldLane,
        progress: LaneProgress,
        room: LaneRoom,
        positions: list[int],
        slots: list[int],
    ) -> None:
        error, started = None, time.perf_counter()
        try:
            done = partial(self._some_done, held, progress)
            self._reading.read(room, progress, positions, slots, done)
        except BaseException as raised:
            error = raised
        seconds = time.perf_counter() - started
        with self._lock:
            self._table.free(held, progress.end_read(positions))
            if error is None:
                self.decode_seconds += seconds
                self.decoded += len(positions)
            self._ended(held, progress, error)

    def _some_done(self, held: HeldLane, progress: LaneProgress, *positions: int) -> None:
        with self._lock:
            if progress.left:
                return
            progress.ready.update(positions)
            # This thread goes on reading. The consumer can make its batch now.
            if self._waited_for is held and held.now.may_make(self._table.step):
                self._ring()

    def _ended(self, held: HeldLane, progress: LaneProgress, error: BaseException | None) -> None:
        progress.busy -= 1
        progress.error = progress.error or error
        self._table.settle(held, progress)
        self._something_to_do.notify_all()
        if self._waited_for is held:
            self._ring()
