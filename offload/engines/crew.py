"""Threads that run nodes, parked between them: one a copy direction, a few for the host's tasks.

    ready(node) -> heap of its engine -> bell -> thread: run, count down who waits for it, next node

One lock guards a step's counters. A Ctrl-C can strike the caller between any two of its lines, so
it holds the lock in `with` blocks only, and waits for its bell outside of them (a `Condition` that
is struck while it takes its lock again goes on without it). A bell is a lock: released is rung.
Whatever a struck caller left half done belongs to its step, and every step has a state of its own;
that a thread runs a node is written down by that thread alone.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import torch

from offload.engines import Lane, Work
from offload.errors import OffloadError

JOIN_SECONDS = 10.0
HOST = "host"
LOOK_SECONDS = 0.5
"""A Ctrl-C that strikes just before the caller begins to wait is seen after so long."""


def _bell() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass(slots=True, eq=False)
class Worker:
    """One that runs nodes of one engine: a thread, or the caller. Changed under the lock."""

    engine: str = ""
    name: str = ""
    """Its row in the trace."""
    bell: threading.Lock = field(default_factory=_bell)
    idle: bool = True
    """It waits for its bell, or will before it looks for work."""
    busy: bool = False
    """It runs a node: only it says so."""
    lane: Lane = field(default_factory=Lane)
    dismissed: bool = False
    """Before it was hired."""

    def ring(self) -> None:
        """Safe to do twice."""
        self.idle = False
        if self.bell.locked():
            self.bell.release()


@dataclass(slots=True, eq=False)
class Step:
    """One run of some work."""

    work: Work
    workers: Mapping[str, Sequence[Worker]]
    """By engine."""
    rank: Sequence[int]
    """The priority of a node: a smaller one is taken first."""
    node_of: Sequence[int]
    """By rank."""
    pending: list[int]
    """For how many others a node waits now."""
    heaps: Mapping[str, list[int]]
    """By engine, the ranks of the nodes that are ready."""
    left: int
    stopping: bool = False
    error: BaseException | None = None
    failed: int | None = None

    @property
    def over(self) -> bool:
        return self.stopping or not self.left

    def ready(self, node: int) -> None:
        engine = self.work.engines[node]
        heappush(self.heaps[engine], self.rank[node])
        for worker in self.workers[engine]:
            if worker.idle:
                worker.ring()
                return

    def fail(self, error: BaseException, node: int | None) -> None:
        """The first error is the one that is told. `node`: whose it is, if it is one's."""
        if not self.stopping:
            self.stopping, self.error, self.failed = True, error, node


@dataclass(slots=True, eq=False)
class Crew:
    """What the threads know. They do not know the engine, so that it can be dropped."""

    clock: Callable[[], float]
    lock: threading.Lock = field(default_factory=threading.Lock)
    caller: Worker = field(default_factory=Worker)
    hired: dict[str, list[Worker]] = field(default_factory=dict)
    """By engine: the threads."""
    step: Step | None = None
    closed: bool = False
    process: int = field(default_factory=os.getpid)
    """Whose threads they are: one that is forked has none of them."""

    def stop(self) -> None:
        """The threads end as soon as they are at rest."""
        if self.process != os.getpid():
            return  # nobody gives the lock back that a thread held when the process was forked
        with self.lock:
            self.closed = True
            for worker in self.threads():
                worker.ring()

    def fail(self, worker: Worker, error: BaseException) -> None:
        """By a node, or by what is around it. The thread lives on: nobody would miss it."""
        nodes = worker.lane.nodes
        with self.lock:
            if self.step is not None:
                self.step.fail(error, nodes[-1] if nodes else None)
            worker.busy, worker.idle = False, True
            self.caller.ring()

    def threads(self) -> list[Worker]:
        return [worker for workers in self.hired.values() for worker in workers]

    def rest(self) -> None:
        """Until no thread runs a node. A Ctrl-C ends the wait; the next step waits again."""
        while True:
            with self.lock:
                if self.step is None:
                    return
                self.step.stopping = True
                if not any(worker.busy for worker in self.threads()):
                    self.step = None
                    return
            self.caller.bell.acquire(timeout=LOOK_SECONDS)

    def take(self, worker: Worker, step: Step) -> int | None:
        """Its next node, if one is ready. Under the lock."""
        heap = step.heaps[worker.engine]
        if heap and not step.stopping:
            worker.busy, worker.idle = True, False
            return step.node_of[heappop(heap)]
        worker.busy, worker.idle = False, True
        if step.over and worker is not self.caller:
            self.caller.ring()
        return None

    def drain(self, worker: Worker, step: Step, lane: Lane) -> None:
        """Run what is ready for this worker until nothing is."""
        lock, clock, take = self.lock, self.clock, self.take
        runs, successors, pending = step.work.runs, step.work.successors, step.pending
        begin, start, end = lane.nodes.append, lane.starts.append, lane.ends.append
        with lock:
            node = take(worker, step)
        while node is not None:
            begin(node)
            start(clock())
            runs[node]()
            end(clock())
            with lock:
                for after in successors[node]:
                    pending[after] -= 1
                    if not pending[after]:
                        step.ready(after)
                step.left -= 1
                node = take(worker, step)


def _serve(crew: Crew, worker: Worker) -> None:
    """A thread, parked between its nodes."""
    with torch.no_grad():  # every thread has a mode of its own
        while True:
            worker.bell.acquire()
            try:
                if not _look(crew, worker):
                    return
            except BaseException as error:
                crew.fail(worker, error)


def _look(crew: Crew, worker: Worker) -> bool:
    """Do what there is to do, and keep nothing of it. False: it, or the crew, is dismissed."""
    with crew.lock:
        if crew.closed or worker.dismissed:
            return False
        step, lane = crew.step, worker.lane
    # One that wakes late may find a later step, of other engines.
    if step is not None and worker.engine in step.heaps:
        crew.drain(worker, step, lane)
    return True


class Hands:
    """The threads of a crew. They know the crew alone, and end when it is stopped."""

    def __init__(self, crew: Crew, host_workers: int) -> None:
        self._crew = crew
        self._host_workers = host_workers
        self._threads: list[threading.Thread] = []

    def of(self, engine: str) -> Sequence[Worker]:
        """Those that run its nodes; hired when they are asked for first."""
        workers = self._crew.hired.setdefault(engine, [])
        count = self._host_workers if engine == HOST else 1
        while len(workers) < count:
            worker = Worker(engine, f"{engine}-{len(workers)}" if count > 1 else engine)
            name = f"perfect-offload-{worker.name}"
            thread = threading.Thread(
                target=_serve, args=(self._crew, worker), name=name, daemon=True
            )
            try:
                thread.start()
                workers.append(worker)
                self._threads.append(thread)
            except BaseException:
                # Refused by the system; or struck by a Ctrl-C, and then it may run all the same.
                # The next step hires another one.
                workers[:] = [one for one in workers if one is not worker]
                worker.dismissed = True
                worker.ring()
                self._threads.append(thread)
                raise
        return workers

    def join(self) -> None:
        """When the crew is stopped."""
        for thread in self._threads:
            if thread.ident is not None:  # or it never started
                thread.join(JOIN_SECONDS)
        hung = [thread.name for thread in self._threads if thread.is_alive()]
        if hung:
            raise OffloadError(
                f"{', '.join(hung)} did not end within {JOIN_SECONDS:.0f} s: a kernel hangs there"
            )
