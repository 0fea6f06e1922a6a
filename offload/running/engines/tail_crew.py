"""Threads of one runner for the tail of its steps: only the host works, the device is another's.

    stage's engine    F1 F2 B2 B1 g1> |stub of u1|  another job's step ......
    own threads                u2 ......... u1 ................ |over
                                            ^ the device is handed on

In the engine's work each node of the tail is a stub: when it runs, everything of the device that
the node waits for is done, and the node may begin here. So the tail's nodes begin as early as they
did, and the engine does not know that there is a tail.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from offload.errors import StepError
from offload.running.engines.crew import HOST, LOOK_SECONDS, Crew, CrewStep, CrewThreads
from offload.running.engines.work import LaneRecord, Record, StepWork


class HostTails(Protocol):
    """Is called when the tail of a step begins and ends. The thread of the step calls it, and does
    not hold the stage then."""

    def on_tail(self) -> None:
        """Only the step's tail is left: from now on another job may use the device. An error ends
        the step as an error of a node does."""
        ...

    def tail_over(self) -> None:
        """The tail is over, or has failed. The step returns, or raises, when this does. It is
        called after every `on_tail`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class SplitWork:
    """The work of a step in two parts."""

    body: StepWork
    """For the stage's engine, numbered as the step: each node of the tail is a stub."""
    tail: StepWork
    nodes: Sequence[int]
    """The tail's numbers in the step."""


class TailCrew:
    """`close` joins the threads. They also end when it is dropped."""

    def __init__(self, host_workers: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._crew = Crew(clock)
        self._crew_threads = CrewThreads(self._crew, host_workers)
        self._at_rest = threading.Event()
        self._at_rest.set()

    def split(self, work: StepWork, nodes: Sequence[int]) -> SplitWork:
        """Cut a step. `nodes`: its tail, in which every node is with all that come after it."""
        runs, successors, waits = list(work.runs), list(work.successors), list(work.waits)
        for number, node in enumerate(nodes):
            for later in successors[node]:
                waits[later] -= 1
            successors[node] = ()
            runs[node] = partial(_release_tail_node, self._crew, number)
        first = tuple(node for node, count in enumerate(waits) if not count)
        body = replace(work, runs=runs, successors=successors, waits=waits, first=first)
        return SplitWork(body, work.part(nodes), nodes)

    # ---- a step, on its thread --------------------------------------------------------------

    def begin(self, split: SplitWork) -> None:
        """Prepare for the stubs. Call `end` whatever happens."""
        crew, work = self._crew, split.tail
        self._at_rest.clear()
        crew.wait_idle()
        numbers = range(len(work.runs))
        step = CrewStep(
            work=work,
            workers={HOST: self._crew_threads.workers_of(HOST)},
            rank=numbers,
            node_of=numbers,
            pending=[count + 1 for count in work.waits],
            heaps={HOST: []},
            left=len(numbers),
        )
        with crew.lock:
            if crew.closed:
                raise StepError("this runner is closed; make another one from its plan")
            for worker in (crew.caller, *crew.threads()):
                worker.idle, worker.busy, worker.ran = True, False, LaneRecord(worker.name)
            crew.step = step

    @property
    def failed(self) -> bool:
        """Whether a node of this step has failed."""
        step = self._crew.step
        return step is not None and step.error is not None

    def finish(self, split: SplitWork, record: Record) -> None:
        """Wait for the tail. Raises the first error of its nodes."""
        step = self._crew.step
        assert step is not None
        while not step.is_over:
            self._crew.caller.bell.acquire(timeout=LOOK_SECONDS)
        self._crew.wait_idle()
        if step.error is not None:
            assert step.failed is not None
            record.failed, error, step.error = split.nodes[step.failed], step.error, None
            try:
                raise error
            finally:
                del error  # it refers to this frame

    def end(self, split: SplitWork, record: Record) -> None:
        """Begin nothing more, wait for what runs, and write down what ran. Safe to call again."""
        if self._at_rest.is_set():
            return
        try:
            self._crew.wait_idle()
        finally:
            _record_tail(split, self._crew, record)
            self._at_rest.set()

    def wait(self) -> None:
        """Wait, on another thread, until no step has a tail here."""
        self._at_rest.wait()

    def close(self) -> None:
        """Wait for a step's tail, and end the threads."""
        self.wait()
        self._crew_threads.close()


def _release_tail_node(crew: Crew, number: int) -> None:
    """Run instead of a node of the tail: the device has done what it waits for."""
    with crew.lock:
        step = crew.step
        if step is None:
            return
        step.pending[number] -= 1
        if not step.pending[number]:
            step.make_ready(number)


def _record_tail(split: SplitWork, crew: Crew, record: Record) -> None:
    """Add what ran of the tail to the step's record, and take out the stubs."""
    stubs = frozenset(split.nodes)
    for ran in record.lanes:
        real = [at for at, node in enumerate(ran.nodes) if node not in stubs]
        if len(real) < len(ran.nodes):
            ran.starts = [ran.starts[at] for at in real if at < len(ran.starts)]
            ran.ends = [ran.ends[at] for at in real if at < len(ran.ends)]
            ran.nodes = [ran.nodes[at] for at in real]
    for worker in crew.threads():
        nodes = [split.nodes[node] for node in worker.ran.nodes]
        record.lanes.append(LaneRecord(worker.name, nodes, worker.ran.starts, worker.ran.ends))
        worker.ran = LaneRecord(worker.name)
