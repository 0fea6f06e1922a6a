"""Threads that do jobs for one consumer, which helps them, or waits.

    thread:    find -> job.run() -> job.settle() -+-> find ...
    consumer:  look -> found, or a job, or wait <-'  `bell.ring`

Jobs are found and settled under one lock, and run without it. A failed job is settled with its
exception; whatever else strikes a thread goes to the consumer, which never waits forever: what
failed may have left a lock behind. The lock knows its holder, so a guard can let go of it wherever
the thread was struck. A Ctrl-C may strike the consumer between any two of its lines, so it holds
the lock in `with` blocks only, and waits for its doorbell outside of them.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Generic, TypeVar

from loaders.errors import WorkerDied
from loaders.workers.precedence import Attendance, Bell, Precedence, process_workers

JOIN_SECONDS = 10.0
LOOK_SECONDS = 1.0
"""The time between two looks of a waiting consumer whether its threads still live."""

Thing = TypeVar("Thing")


@dataclass(frozen=True, slots=True, eq=False)
class CrewJob:
    """Something that a thread, or the consumer, does."""

    run: Callable[[], Any]
    """Called without the lock."""
    settle: Callable[[Any, BaseException | None], None]
    """Called under the lock with what `run` returned or raised."""


@dataclass(frozen=True, slots=True, eq=False)
class FoundThing(Generic[Thing]):
    """What the consumer wanted."""

    thing: Thing


class ThreadCrew:
    """At most `workers` threads. The consumer calls `close` at the end."""

    def __init__(self, name: str, workers: int, precedence: Precedence | None = None) -> None:
        """`precedence`: its loader's; None: always in front."""
        self.lock = threading.RLock()
        self.idle = threading.Condition(self.lock)
        """Wakes threads that wait, so that they look for jobs."""
        self.bell = Bell()
        """Has the consumer look again."""
        self.needed = True
        """Whether a thread that finds no job waits for one. Else it ends."""
        self.stopping = False
        self.waiting = False
        """Whether the consumer waits."""
        self.stall_seconds = 0.0
        """The time that the consumer waited."""
        self._name = name
        self._workers = workers
        self._at_work = 0
        """This many threads have begun and not ended."""
        self._threads: list[threading.Thread] = []
        self._precedence = precedence or Precedence()
        self._struck: BaseException | None = None
        """What struck a thread outside of its jobs."""
        self._failed: BaseException | None = None
        """The first failure of all."""

    def start(self, find: Callable[[], CrewJob | None]) -> None:
        """Start the threads that are missing. They find their jobs with `find`, under the lock."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        while self._at_work < self._workers:
            name = f"{self._name}-{self._at_work}"
            thread = threading.Thread(target=self._work, args=(find,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
            self._at_work += 1

    @property
    def _living(self) -> int:
        return sum(thread.is_alive() for thread in self._threads)

    def is_worker(self) -> bool:
        """Whether the calling thread is one of the crew."""
        return threading.current_thread() in self._threads

    # ---- the consumer's side --------------------------------------------------------------------

    def wait_for(self, look: Callable[[], FoundThing[Thing] | CrewJob | None]) -> Thing:
        """Do the jobs that `look` finds under the lock, or wait, until it finds what is wanted."""
        waited = 0.0
        while True:
            with self.lock:
                if self._struck is not None:
                    raise self._struck
                action = look()
                if action is None:
                    self.waiting = True
                    self.bell.reset()
                    if self._precedence.gives_way:
                        process_workers.wake_all()  # it is in front as long as somebody waits
            if isinstance(action, FoundThing):
                return action.thing
            if action is not None:
                self._do(action)
                continue
            started = perf_counter()
            rung = self.bell.wait(LOOK_SECONDS)
            self.waiting = False
            self.stall_seconds += perf_counter() - started
            waited = 0.0 if rung else waited + LOOK_SECONDS
            if not rung:
                self._look_for_the_dead(waited)

    def run_off_worker(self, job: Callable[[], object]) -> bool:
        """If this thread is one of the crew, run `job` on a new thread; returns whether it did.
        (The garbage collector may close a loader on a thread that holds the lock.)"""
        if not self.is_worker():
            return False
        threading.Thread(target=job, name=f"{self._name}-end", daemon=True).start()
        return True

    def close(self) -> bool:
        """Stop and join the threads, with a bound; returns whether all have ended and nothing
        failed, so that what they work with may be used again. It is safe to call this again."""
        if self.run_off_worker(self.close):
            return False
        with self.lock:
            self._stop()
        process_workers.wake_all()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(JOIN_SECONDS)
        return self._failed is None and not self._living

    def _stop(self) -> None:
        self.stopping = True
        self.idle.notify_all()
        self.bell.ring()

    def _look_for_the_dead(self, waited: float) -> None:
        with self.lock:
            if self._failed is not None and waited > JOIN_SECONDS:
                raise self._failed
            if self._struck is None and self._living < self._at_work:
                raise WorkerDied(
                    f"a thread of {self._name} ended before it began to work; see what it"
                    " wrote to stderr"
                )

    # ---- a thread -------------------------------------------------------------------------------

    def _work(self, find: Callable[[], CrewJob | None]) -> None:
        attendance = None
        try:
            attendance = Attendance(self._workers)
            while (job := self._next_job(attendance, find)) is not None:
                self._do(job)
                del job  # or what it made would stay while this thread waits
            attendance.leave()
        except BaseException as error:
            self._let_go()
            if attendance is not None:
                attendance.leave()
            with self.lock:
                self._struck = self._failed = error
                self._stop()

    def _next_job(
        self, attendance: Attendance, find: Callable[[], CrewJob | None]
    ) -> CrewJob | None:
        """Wait for a job. None: the thread ends."""
        while True:
            with self.lock:
                in_turn = attendance.begins(self._gives_way)
                if in_turn and not self.stopping and (job := find()) is not None:
                    return job
                if in_turn:
                    attendance.rests()
                if self.stopping or (in_turn and not self.needed):
                    self._at_work -= 1
                    return None
                if in_turn:
                    self.idle.wait()
            if not in_turn:
                attendance.wait()

    def _gives_way(self) -> bool:
        return self._precedence.gives_way and not self.waiting

    def _do(self, job: CrewJob) -> None:
        made = error = None
        try:
            made = job.run()
        except BaseException as raised:
            error = raised
            self._let_go()
        with self.lock:
            self._failed = self._failed or error
            job.settle(made, error)

    def _let_go(self) -> None:
        """Leave the lock, if this thread holds it, however often it took it."""
        with suppress(RuntimeError):
            while True:
                self.lock.release()
