"""Threads that run nodes and park in between: one a copy direction, a few for the host's tasks.

    ready(node) -> heap of its lane -> bell -> thread: run it, count down its successors, go on

One lock guards a step's counters. A Ctrl-C can hit the caller between any two lines. So it holds
the lock only in `with` blocks, and waits for its bell outside of them (a `Condition` that is hit
while it takes its lock again would go on without it). A bell is a lock, and to release it is to
ring it. What an interrupted caller leaves half done belongs to its step, and every step has a state
of its own. Only the thread that runs a node notes that it does.
"""

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import torch

from offload.errors import OffloadError
from offload.gate import Gate
from offload.running.engines.work import LaneRecord, StepWork

JOIN_SECONDS = 10.0
HOST = "host"
LOOK_SECONDS = 0.5
"""Seconds until the caller notices a Ctrl-C that hits just before it begins to wait."""


def _make_bell() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass(slots=True, eq=False)
class Worker:
    """Runs nodes of one lane: a thread, or the caller. It is changed under the lock."""

    lane: str = ""
    name: str = ""
    """The name of its row in the trace."""
    bell: threading.Lock = field(default_factory=_make_bell)
    idle: bool = True
    """Whether it waits for its bell, or will before it looks for work."""
    busy: bool = False
    """Whether it runs a node. Only the worker itself sets it."""
    ran: LaneRecord = field(default_factory=LaneRecord)
    dismissed: bool = False
    """Whether its thread must end, because it was interrupted while it was hired."""

    def ring(self) -> None:
        """Wake the worker. Ringing twice does no harm."""
        self.idle = False
        if self.bell.locked():
            self.bell.release()


@dataclass(slots=True, eq=False)
class CrewStep:
    """The state of one run of some work."""

    work: StepWork
    workers: Mapping[str, Sequence[Worker]]
    """The workers of each lane."""
    rank: Sequence[int]
    """The priority of each node; the smallest is taken first."""
    node_of: Sequence[int]
    """The node of each rank."""
    pending: list[int]
    """For how many other nodes each node still waits."""
    heaps: Mapping[str, list[int]]
    """By lane: the ranks of the ready nodes."""
    left: int
    stopping: bool = False
    error: BaseException | None = None
    failed: int | None = None

    @property
    def is_over(self) -> bool:
        return self.stopping or not self.left

    def make_ready(self, node: int) -> None:
        lane = self.work.lane_of[node]
        heappush(self.heaps[lane], self.rank[node])
        for worker in self.workers[lane]:
            if worker.idle:
                worker.ring()
                return

    def fail(self, error: BaseException, node: int | None) -> None:
        """Note an error; the first one is reported. `node`: the node that raised it, if any."""
        if not self.stopping:
            self.stopping, self.error, self.failed = True, error, node


@dataclass(slots=True, eq=False)
class Crew:
    """What the threads share. They do not refer to the engine, so that it can be dropped."""

    clock: Callable[[], float]
    lock: threading.Lock = field(default_factory=threading.Lock)
    caller: Worker = field(default_factory=Worker)
    hired: dict[str, list[Worker]] = field(default_factory=dict)
    """The threads of each lane."""
    step: CrewStep | None = None
    closed: bool = False
    held: bool = False
    """Whether no thread may begin a node, because a guest has the step's memory."""
    quiet: threading.Lock = field(default_factory=_make_bell)
    """The bell of a guest that waits until no thread runs a node."""
    gate: Gate | None = None
    """The caller lets guests in between two nodes; None if it runs no nodes."""
    process: int = field(default_factory=os.getpid)
    """The process of the threads. A forked process has none of them."""

    def stop(self) -> None:
        """Tell the threads to end as soon as they are at rest."""
        if self.process != os.getpid():
            return  # in a forked process nobody releases a lock that a thread held
        with self.lock:
            self.closed = True
            for worker in self.threads():
                worker.ring()

    def fail(self, worker: Worker, error: BaseException) -> None:
        """Note an error of a node or of the code around it. The thread lives on: nobody would
        notice its end."""
        nodes = worker.ran.nodes
        with self.lock:
            if self.step is not None:
                self.step.fail(error, nodes[-1] if nodes else None)
            worker.busy, worker.idle = False, True
            self.caller.ring()

    def threads(self) -> list[Worker]:
        return [worker for workers in self.hired.values() for worker in workers]

    def wait_idle(self) -> None:
        """Wait until no thread runs a node. A Ctrl-C ends the wait; then the next step waits
        again."""
        while True:
            with self.lock:
                if self.step is None:
                    return
                self.step.stopping = True
                if not any(worker.busy for worker in self.threads()):
                    self.step = None
                    return
            self.caller.bell.acquire(timeout=LOOK_SECONDS)

    def pause(self) -> None:
        """Wait until no thread runs a node. None begins one before `resume`."""
        with self.lock:
            self.held = True
        while True:
            with self.lock:
                if not any(worker.busy for worker in self.threads()):
                    return
            self.quiet.acquire(timeout=LOOK_SECONDS)

    def resume(self) -> None:
        with self.lock:
            self.held = False
            if self.step is not None:
                for lane, heap in self.step.heaps.items():
                    for worker in self.step.workers.get(lane, ()) if heap else ():
                        if worker is not self.caller:
                            worker.ring()

    def take(self, worker: Worker, step: CrewStep) -> int | None:
        """The worker's next node if one is ready. Call it under the lock."""
        heap = step.heaps[worker.lane]
        if self.held and worker is not self.caller:
            heap = []
            if self.quiet.locked():
                self.quiet.release()
        if heap and not step.stopping:
            worker.busy, worker.idle = True, False
            return step.node_of[heappop(heap)]
        worker.busy, worker.idle = False, True
        if step.is_over and worker is not self.caller:
            self.caller.ring()
        return None

    def drain(self, worker: Worker, step: CrewStep, ran: LaneRecord) -> None:
        """Run nodes for this worker until none is ready."""
        lock, clock, take = self.lock, self.clock, self.take
        runs, successors, pending = step.work.runs, step.work.successors, step.pending
        begin, start, end = ran.nodes.append, ran.starts.append, ran.ends.append
        gate = self.gate if worker is self.caller else None
        with lock:
            node = take(worker, step)
        while node is not None:
            if gate is not None and gate.wanted:
                gate.pass_on()
            begin(node)
            start(clock())
            runs[node]()
            end(clock())
            with lock:
                for after in successors[node]:
                    pending[after] -= 1
                    if not pending[after]:
                        step.make_ready(after)
                step.left -= 1
                node = take(worker, step)


def _serve(crew: Crew, worker: Worker) -> None:
    """The loop of a thread, which is parked between its nodes."""
    with torch.no_grad():  # grad mode belongs to a thread
        while True:
            worker.bell.acquire()
            try:
                if not _do_work(crew, worker):
                    return
            except BaseException as error:
                crew.fail(worker, error)


def _do_work(crew: Crew, worker: Worker) -> bool:
    """Run what is ready, and keep no reference to it. False: the worker or crew is dismissed."""
    with crew.lock:
        if crew.closed or worker.dismissed:
            return False
        step, ran = crew.step, worker.ran
    # A thread that wakes late may find a later step, with other lanes.
    if step is not None and worker.lane in step.heaps:
        crew.drain(worker, step, ran)
    return True


class CrewThreads:
    """The threads of a crew. They refer to the crew alone, and end with this object."""

    def __init__(self, crew: Crew, host_workers: int) -> None:
        self._crew = crew
        self.host_workers = host_workers
        self._threads: list[threading.Thread] = []
        self._finalizer = weakref.finalize(self, crew.stop)

    def workers_of(self, lane: str) -> Sequence[Worker]:
        """The workers of a lane, which are hired at the first call."""
        workers = self._crew.hired.setdefault(lane, [])
        count = self.host_workers if lane == HOST else 1
        while len(workers) < count:
            worker = Worker(lane, f"{lane}-{len(workers)}" if count > 1 else lane)
            name = f"perfect-offload-{worker.name}"
            thread = threading.Thread(
                target=_serve, args=(self._crew, worker), name=name, daemon=True
            )
            try:
                thread.start()
                workers.append(worker)
                self._threads.append(thread)
            except BaseException:
                # The system refused the thread, or a Ctrl-C hit, and then the thread may run all
                # the same. The next step hires another one.
                workers[:] = [other for other in workers if other is not worker]
                worker.dismissed = True
                worker.ring()
                self._threads.append(thread)
                raise
        return workers

    def close(self) -> None:
        """Stop the crew, and wait for its threads to end."""
        self._finalizer()
        for thread in self._threads:
            if thread.ident is not None:  # otherwise it never started
                thread.join(JOIN_SECONDS)
        hung = [thread.name for thread in self._threads if thread.is_alive()]
        if hung:
            raise OffloadError(
                f"{', '.join(hung)} did not end within {JOIN_SECONDS:.0f} s, so a kernel hangs"
                " there. End this process"
            )
