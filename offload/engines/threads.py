"""Compute on the caller's thread; copies, host tasks and further devices on threads of their own.

    caller   compute   F1 F2 F3 ...        whoever finishes a node counts down those that wait for
    thread   h2d       w2 w3 ...           it, puts the ready ones on their engines' heaps, rings an
    thread   d2h       a1 ...              idle engine's bell, and takes its own next node: no loop
    thread   host-0    ...                 in the middle, no queue, no round trip

A step in which nothing but the inputs moves has nothing to overlap: its nodes run one after the
other on the caller's thread, without a lock between two of them.

The caller computes, because Ctrl-C arrives on the main thread, and because torch has a team of
threads for each thread that computes: this way it is the team that eager torch has.
"""

import random
import time
import weakref
from collections.abc import Callable, Sequence

from offload.engines import Lane, Record, Work
from offload.engines.crew import LOOK_SECONDS, Crew, Hands, Step, Worker
from offload.engines.serial import Serial
from offload.errors import StepError

COMPUTE = "compute"


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
        self._crew = Crew(clock)
        self._hands = Hands(self._crew, host_workers)
        self._finalizer = weakref.finalize(self, self._crew.stop)
        self._in_a_row = Serial(clock=clock)

    def run(self, work: Work, record: Record) -> None:
        crew = self._crew
        self._rest()  # of a step whose caller was struck twice
        if work.alone and self._random is None and not crew.closed:
            self._in_a_row.run(work, record)
            return
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
        return (crew.caller,) if engine == crew.caller.engine else self._hands.of(engine)

    def _rest(self) -> None:
        self._crew.rest()

    def close(self) -> None:
        self._finalizer()
        self._hands.join()
