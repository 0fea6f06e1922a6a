"""Nodes on the streams of a device, some of them ahead of time; host tasks on threads.

    caller   enqueue F1 W2 F2 a1 | wait e1 | enqueue F3 ..    by issue.py, ahead of time
    compute  [ F1 ][ F2 ]...[ F3 ]
    h2d      [ W2 ]..[ W3 ]            waits on the device for every edge that nothing else implies
    host-0          [ update 9 ]       begins when the host has seen the events that it waits for

The host waits only when every stream has its fill. When `run` returns nothing touches host memory
any more; kernels may still run, and whatever the caller does on its own stream comes after them.

A trace shows when the host enqueued each node, and for how long that took it; `measure` asks for
the device's own times instead, which costs two events a node and an end at which the host waits.

An exception of a node ends the step: nothing new is enqueued, the streams run dry, and it leaves
`run` as it is. One that the device tells late cannot name its node; it names those under way.
"""

import random
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from offload.drivers import Driver
from offload.engines import Lane, Record, Run, Work
from offload.engines.crew import HOST, Crew, Hands, Step
from offload.engines.issue import DEPTH, Chart, Issue, Issued
from offload.errors import DeviceLost, StepError
from offload.lost import device_lost
from offload.taskgraph import RANKS

HOST_ENGINES = (HOST, RANKS)
COMPUTE = "compute"
SPINS = 32
PAUSE_SECONDS = 50e-6
"""Between two looks at the device, when so many of them saw nothing new."""


@dataclass(slots=True, eq=False)
class Score:
    """Some work, read for streams; of every step the same."""

    chart: Chart
    streams: Sequence[Any]
    """By engine of the chart; of the host's: None."""
    hosted: Work
    """Its nodes on the host, which tell when they are done."""
    host_nodes: int


@dataclass(slots=True, eq=False)
class Play:
    """One step."""

    work: Work
    score: Score
    issue: Issue
    lanes: Sequence[Lane]
    """By engine of the chart."""
    crew_step: Step
    host_left: int
    timed: list[tuple[Lane, Any, Any]] = field(default_factory=list)
    """Of every node of a stream, where it is measured: its lane, the events around it."""


class Streams:
    """Over a driver, which it closes."""

    def __init__(
        self,
        driver: Driver,
        order: str = "priority",
        seed: int = 0,
        host_workers: int = 1,
        depth: int = DEPTH,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.measure = False
        """The next steps are timed on the device."""
        self._driver = driver
        self._random = random.Random(seed) if order == "random" else None
        self._depth = depth
        self._workers = {HOST: host_workers, RANKS: 1}
        self._crew = Crew(clock)
        self._hands = Hands(self._crew, host_workers)
        self._finalizer = weakref.finalize(self, self._crew.stop)
        self._scores: weakref.WeakKeyDictionary[Work, Score] = weakref.WeakKeyDictionary()
        self._events: dict[int, Any] = {}
        """Of a node of any work: a wait is for the last record before it."""
        self._tails: dict[str, Any] = {}
        self._clocks: list[Any] = []
        """Events that measure."""
        self._done: deque[int] = deque()
        """Nodes on the host that have ended."""
        self._clean = True
        """The last step has come to its end."""
        self._lost: DeviceLost | None = None

    def run(self, work: Work, record: Record) -> None:
        self.check()
        self._clean = False
        play: Play | None = None
        try:
            play = self._begin(work, record)
            while play.issue.unissued or play.host_left:
                issued = play.issue.next()
                if issued is not None:
                    self._enqueue(play, issued)
                else:
                    self._look(play, record)
            self._end(play, record)
        except BaseException as error:
            self._fail(error, play, record)
            raise
        self._clean = True

    def _begin(self, work: Work, record: Record) -> Play:
        """Nobody is busy now."""
        score = self._scores.get(work)
        if score is None:
            score = self._scores[work] = self._read(work)
        crew, chart = self._crew, score.chart
        self._done.clear()
        rank = list(range(len(work.runs)))
        if self._random is not None:
            self._random.shuffle(rank)
        lanes = [Lane(engine) for engine in chart.engines]
        workers = {e: self._hands.of(e) for e in chart.engines if e in HOST_ENGINES}
        step = Step(
            work=score.hosted,
            workers=workers,
            rank=rank,
            node_of=sorted(rank, key=rank.__getitem__),
            pending=[],
            heaps={engine: [] for engine in workers},
            left=score.host_nodes,
        )
        record.timed = False
        record.lanes += [lane for lane in lanes if lane.name not in HOST_ENGINES]
        with crew.lock:
            if crew.closed:
                raise StepError("this engine is closed")
            for worker in crew.threads():
                worker.idle, worker.busy, worker.lane = True, False, Lane(worker.name)
                record.lanes.append(worker.lane)
            crew.step = step
        issue = Issue(chart, self._depth, self._workers, rank)
        self._driver.begin()
        return Play(work, score, issue, lanes, step, score.host_nodes)

    def _read(self, work: Work) -> Score:
        chart = Chart.of(work.engines, work.successors, HOST_ENGINES)
        streams = [
            None if host else self._driver.stream(engine)
            for engine, host in zip(chart.engines, chart.on_host, strict=True)
        ]
        runs = list(work.runs)
        hosted = [n for n, engine in enumerate(work.engines) if engine in HOST_ENGINES]
        for node in hosted:
            drain = self._driver.drain if work.engines[node] == RANKS else None
            runs[node] = partial(_on_host, runs[node], node, drain, self._done, self._crew)
        nobody: Sequence[Sequence[int]] = [()] * len(runs)
        return Score(chart, streams, replace(work, runs=runs, successors=nobody), len(hosted))

    def _enqueue(self, play: Play, issued: Issued) -> None:
        node, score = issued.node, play.score
        engine = score.chart.engine[node]
        stream = score.streams[engine]
        if stream is None:
            with self._crew.lock:
                play.crew_step.ready(node)
            return
        driver, lane, clock = self._driver, play.lanes[engine], self._crew.clock
        for dep in issued.waits:
            driver.wait(stream, self._events[dep])
        lane.nodes.append(node)
        lane.starts.append(clock())
        if self.measure:
            self._timed(play, lane, stream, play.work.runs[node])
        else:
            driver.enqueue(stream, play.work.runs[node])
        lane.ends.append(clock())
        if issued.mark:
            event = self._events.get(node)
            if event is None:
                event = self._events[node] = driver.event()
            event.record(stream)

    def _timed(self, play: Play, lane: Lane, stream: Any, run: Run) -> None:
        used = 2 * len(play.timed)
        while len(self._clocks) < used + 2:
            self._clocks.append(self._driver.event(timing=True))
        first, last = self._clocks[used : used + 2]
        first.record(stream)
        self._driver.enqueue(stream, run)
        last.record(stream)
        play.timed.append((lane, first, last))

    def _look(self, play: Play, record: Record) -> None:
        """Until something is complete."""
        issue, events, done, step = play.issue, self._events, self._done, play.crew_step
        looks = 0
        while True:
            told = [node for node in issue.marks() if events[node].done()]
            while done:
                told.append(done.popleft())
                play.host_left -= 1
            for node in told:
                issue.complete(node)
            if step.stopping and step.error is not None:
                record.failed, error, step.error = step.failed, step.error, None
                try:
                    raise error
                finally:
                    del error  # it knows this frame
            if told:
                return
            looks += 1
            if looks > SPINS:
                self._crew.caller.bell.acquire(timeout=PAUSE_SECONDS)

    def _end(self, play: Play, record: Record) -> None:
        """Host memory is the caller's again, and what is on the device comes before what it does
        there next."""
        for stream, lane in zip(play.score.streams, play.lanes, strict=True):
            if stream is not None and not lane.name.startswith(COMPUTE):
                event = self._tails.get(lane.name)
                if event is None:
                    event = self._tails[lane.name] = self._driver.event()
                event.record(stream)
        self._driver.end()
        for lane in play.lanes:
            event = self._tails.get(lane.name)
            if event is not None:
                self._await(event)
        self._crew.rest()
        if play.timed:
            self._driver.synchronize()
            _write_times(play, record)

    def _await(self, event: Any) -> None:
        looks = 0
        while not event.done():
            looks += 1
            if looks > SPINS:
                self._crew.caller.bell.acquire(timeout=PAUSE_SECONDS)

    def _settle(self) -> BaseException | None:
        """What the device says when it has run dry, and the step's fence is down."""
        told: BaseException | None = None
        for call in (self._driver.end, self._driver.synchronize):
            try:
                call()
            except Exception as error:
                told = told or error
        self._clean = True
        return told

    def _fail(self, error: BaseException, play: Play | None, record: Record) -> None:
        """The step is over. Raises `DeviceLost` where the device is."""
        if record.failed is None:
            lanes = play.lanes if play else ()
            begun = [lane.nodes[-1] for lane in lanes if len(lane.nodes) > len(lane.ends)]
            record.failed = begun[0] if begun else None
        if play and record.failed is None and isinstance(error, Exception):
            record.under_way = play.issue.under_way()
        self._dry(error)

    def _dry(self, error: BaseException | None = None) -> None:
        """Until nothing of the step runs. Raises where the error, or what is told then, says that
        the device is lost."""
        self._clean = False
        self._crew.rest()
        late = self._settle()
        for told in (error, late):
            lost = told and device_lost(told, self._driver.device)
            if lost:
                self._lost = lost
                raise lost from told

    def check(self) -> None:
        """Before a step: raises where the device is lost. Nothing of one that failed runs any more,
        if a Ctrl-C struck that wait."""
        if self._lost is not None:
            raise DeviceLost(*self._lost.args)
        if not self._clean:
            self._dry()

    def fail(self, error: BaseException) -> None:
        """What another user of the driver met: streams run dry, and `DeviceLost` where it is."""
        self._fail(error, None, Record())

    def close(self) -> None:
        self._finalizer()
        try:
            self._hands.join()
        finally:
            if self._lost is None:
                self._driver.close()


def _on_host(
    run: Run, node: int, drain: Callable[[], None] | None, done: deque[int], crew: Crew
) -> None:
    run()
    if drain is not None:
        drain()
    with crew.lock:
        done.append(node)
        crew.caller.ring()


def _write_times(play: Play, record: Record) -> None:
    """The device's times instead of the host's, from the first node's begin."""
    record.timed = True
    zero = min((lane.starts[0] for lane in play.lanes if lane.starts), default=0.0)
    _, base, _ = play.timed[0]
    for lane in play.lanes:
        mine = [(first, last) for own, first, last in play.timed if own is lane]
        if mine:
            lane.starts = [zero + first.seconds_since(base) for first, _ in mine]
            lane.ends = [zero + last.seconds_since(base) for _, last in mine]
    for lane in play.lanes:
        if lane.name == COMPUTE:
            between = zip(lane.ends, lane.starts[1:], strict=False)
            record.waited = sum(max(0.0, begin - end) for end, begin in between)
