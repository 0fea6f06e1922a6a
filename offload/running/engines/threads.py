"""Computes on the caller's thread; copies, host tasks and further devices have their own threads.

    caller   compute   F1 F2 F3 ...        whoever finishes a node counts down the nodes that wait
    thread   h2d       w2 w3 ...           for it, puts ready ones on their lanes' heaps, rings
    thread   d2h       a1 ...              the bell of an idle worker, and takes its own next node.
    thread   host-0    ...                 There is no central loop, queue or round trip.

If only the inputs move, nothing can overlap. Then the nodes run one after the other on the caller's
thread, without a lock in between.

The caller's thread computes because Ctrl-C arrives on the main thread, and because torch has a team
of threads for each computing thread: this way it is the team that eager torch uses.
"""

import random
import time
from collections.abc import Callable, Sequence

from offload.errors import StepError
from offload.gate import Gate
from offload.running.engines.crew import LOOK_SECONDS, Crew, CrewStep, CrewThreads, Worker
from offload.running.engines.serial import Serial
from offload.running.engines.work import LaneRecord, Record, StepWork

COMPUTE = "compute"


class Threads:
    """`close()` joins the threads. They also end when the engine is dropped."""

    captures = False

    def __init__(
        self,
        order: str = "priority",
        seed: int = 0,
        host_workers: int = 1,
        clock: Callable[[], float] = time.perf_counter,
        gate: Gate | None = None,
    ) -> None:
        self.measure = False  # every node is timed anyway
        self._random = random.Random(seed) if order == "random" else None
        self._gate = gate or Gate()
        self._crew = Crew(clock, gate=self._gate)
        self._crew_threads = CrewThreads(self._crew, host_workers)
        self._in_a_row = Serial(clock=clock, gate=self._gate)

    def run(self, work: StepWork, record: Record) -> None:
        crew = self._crew
        crew.wait_idle()  # a Ctrl-C may have ended the wait for the last step
        if work.in_a_row and self._random is None and not crew.closed:
            self._in_a_row.run(work, record)
            return
        step: CrewStep | None = None
        try:
            step = self._begin(work, record)
            while not step.is_over:
                crew.drain(crew.caller, step, crew.caller.ran)
                if not step.is_over:
                    since, aside = crew.clock(), self._gate.stood_aside
                    with self._gate.rested():
                        crew.caller.bell.acquire(timeout=LOOK_SECONDS)
                    record.waited += crew.clock() - since - (self._gate.stood_aside - aside)
        except BaseException:
            ran = crew.caller.ran
            record.failed = ran.nodes[-1] if len(ran.nodes) > len(ran.ends) else None
            raise
        finally:
            crew.wait_idle()
        if step is not None and step.error is not None:
            record.failed, error, step.error = step.failed, step.error, None
            try:
                raise error
            finally:
                del error  # it refers to this frame

    def _begin(self, work: StepWork, record: Record) -> CrewStep:
        """Make the state of a step. No thread is busy now."""
        crew = self._crew
        count = len(work.runs)
        node_of = list(range(count))
        rank = node_of
        if self._random is not None:
            self._random.shuffle(node_of)
            rank = [0] * count
            for at, node in enumerate(node_of):
                rank[node] = at
        computes = [lane for lane in work.lanes if lane.startswith(COMPUTE)]
        crew.caller.lane = crew.caller.name = min(computes, default="")
        step = CrewStep(
            work=work,
            workers={lane: self._workers(lane) for lane in work.lanes},
            rank=rank,
            node_of=node_of,
            pending=list(work.waits),
            heaps={lane: [] for lane in (*work.lanes, crew.caller.lane)},
            left=count,
        )
        with crew.lock:
            if crew.closed:
                raise StepError("this engine is closed; make a new runner")
            for worker in (crew.caller, *crew.threads()):
                worker.idle, worker.busy, worker.ran = True, False, LaneRecord(worker.name)
                record.lanes.append(worker.ran)
            crew.step = step
            for node in work.first:
                step.make_ready(node)
        return step

    def _workers(self, lane: str) -> Sequence[Worker]:
        crew = self._crew
        return (crew.caller,) if lane == crew.caller.lane else self._crew_threads.workers_of(lane)

    def pause(self) -> None:
        self._crew.pause()

    def resume(self) -> None:
        self._crew.resume()

    def close(self) -> None:
        self._crew_threads.close()
