"""Compute on the caller's thread; copies, host tasks and further devices on threads of their own.

    caller   compute   F1 F2 F3 ...        whoever finishes a node counts down those that wait for
    thread   h2d       w2 w3 ...           it, puts the ready ones on their engines' heaps, rings an
    thread   d2h       a1 ...              idle engine's bell, and takes its own next node: no loop
    thread   host-0    ...                 in the middle, no queue, no round trip

The caller computes, because Ctrl-C arrives on the main thread, and because torch has a team of
threads for each thread that computes: this way it is the team that eager torch has.

One lock guards a step's counters. A Ctrl-C can strike the caller between any two of its lines, so
it holds the lock in `with` blocks only, and waits for its bell outside of them (a `Condition` that
is struck while it takes its lock again goes on without it). A bell is a lock: released is rung.
Whatever a struck caller left half done belongs to its step, and every step has a state of its own;
that a thread runs a node is written down by that thread alone.
"""

import random
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import torch

from offload.engines import Lane, Record, Work
from offload.errors import OffloadError, StepError

JOIN_SECONDS = 10.0
LOOK_SECONDS = 0.5
"""A Ctrl-C that strikes just before the caller begins to wait is seen after so long."""
COMPUTE, HOST = "compute", "host"


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

    def fail(self, error: BaseException, node: int) -> None:
        """The first error is the one that is told."""
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

    def stop(self) -> None:
        """The threads end as soon as they are at rest."""
        with self.lock:
            self.closed = True
            for worker in self.threads():
                worker.ring()

    def threads(self) -> list[Worker]:
        return [worker for workers in self.hired.values() for worker in workers]

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
            if not _look(crew, worker):
                return


def _look(crew: Crew, worker: Worker) -> bool:
    """Do what there is to do, and keep nothing of it. False: the crew is dismissed."""
    with crew.lock:
        if crew.closed:
            return False
        step, lane = crew.step, worker.lane
    if step is None:
        return True
    try:
        crew.drain(worker, step, lane)
    except BaseException as error:
        with crew.lock:
            step.fail(error, lane.nodes[-1])
            worker.busy, worker.idle = False, True
            crew.caller.ring()
    return True


class Threads:
    """`close()` joins the threads; they end as well when it is dropped."""

    def __init__(
        self,
        order: str = "priority",
        seed: int = 0,
        host_workers: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._random = random.Random(seed) if order == "random" else None
        self._host_workers = host_workers
        self._crew = Crew(clock)
        self._threads: list[threading.Thread] = []
        self._finalizer = weakref.finalize(self, self._crew.stop)

    def run(self, work: Work, record: Record) -> None:
        crew = self._crew
        self._rest()  # of a step whose caller was struck twice
        try:
            step = self._begin(work, record)
            while not step.over:
                crew.drain(crew.caller, step, crew.caller.lane)
                if not step.over:
                    since = crew.clock()
                    crew.caller.bell.acquire(timeout=LOOK_SECONDS)
                    record.waited += crew.clock() - since
        except BaseException:
            lane = crew.caller.lane
            record.failed = lane.nodes[-1] if len(lane.nodes) > len(lane.ends) else None
            raise
        finally:
            self._rest()
        if step.error is not None:
            record.failed, error, step.error = step.failed, step.error, None
            try:
                raise error
            finally:
                del error  # it knows this frame

    def _begin(self, work: Work, record: Record) -> Step:
        """Nobody is busy now."""
        crew = self._crew
        count = len(work.runs)
        node_of = list(range(count))
        rank = node_of
        if self._random is not None:
            self._random.shuffle(node_of)
            rank = [0] * count
            for at, node in enumerate(node_of):
                rank[node] = at
        computes = [engine for engine in work.lanes if engine.startswith(COMPUTE)]
        crew.caller.engine = crew.caller.name = min(computes, default="")
        step = Step(
            work=work,
            workers={engine: self._workers(engine) for engine in work.lanes},
            rank=rank,
            node_of=node_of,
            pending=list(work.waits),
            heaps={engine: [] for engine in (*work.lanes, crew.caller.engine)},
            left=count,
        )
        with crew.lock:
            if crew.closed:
                raise StepError("this engine is closed")
            for worker in (crew.caller, *crew.threads()):
                worker.idle, worker.busy, worker.lane = True, False, Lane(worker.name)
                record.lanes.append(worker.lane)
            crew.step = step
            for node in work.first:
                step.ready(node)
        return step

    def _workers(self, engine: str) -> Sequence[Worker]:
        crew = self._crew
        if engine == crew.caller.engine:
            return (crew.caller,)
        if engine not in crew.hired:
            count = self._host_workers if engine == HOST else 1
            names = [f"{engine}-{n}" for n in range(count)] if count > 1 else [engine]
            crew.hired[engine] = [Worker(engine, name) for name in names]
            for worker in crew.hired[engine]:
                name = f"perfect-offload-{worker.name}"
                thread = threading.Thread(
                    target=_serve, args=(crew, worker), name=name, daemon=True
                )
                self._threads.append(thread)
                thread.start()
        return crew.hired[engine]

    def _rest(self) -> None:
        """Until no thread runs a node. A Ctrl-C ends the wait; the next step waits again."""
        crew = self._crew
        while True:
            with crew.lock:
                if crew.step is None:
                    return
                crew.step.stopping = True
                if not any(worker.busy for worker in crew.threads()):
                    crew.step = None
                    return
            crew.caller.bell.acquire(timeout=LOOK_SECONDS)

    def close(self) -> None:
        self._finalizer()
        for thread in self._threads:
            thread.join(JOIN_SECONDS)
        hung = [thread.name for thread in self._threads if thread.is_alive()]
        if hung:
            raise OffloadError(
                f"{', '.join(hung)} did not end within {JOIN_SECONDS:.0f} s: a kernel hangs there"
            )
