"""Enqueues nodes on the streams of devices ahead of time; host tasks run on threads.

    caller   enqueue F1 W2 F2 a1 | wait e1 | enqueue F3 ..    by issue.py, ahead of time
    compute  [ F1 ][ F2 ]...[ F3 ]
    h2d      [ W2 ]..[ W3 ]            waits on the device for every edge that nothing else implies
    host-0          [ update 9 ]       begins when the host has seen the events that it waits for

The host waits only when every stream has enough to do. When `run` returns, nothing touches host
memory any more. Kernels may still run; what the caller then does on its own stream comes after
them.

A trace shows when the host enqueued each node, and how long that took. With `measure` it has the
device's own times, which costs two events a node and a wait at the end.

An exception of a node ends the step: nothing new is enqueued, the streams run dry, and it leaves
`run` as it is. An error that the device reports late names the nodes under way instead.
"""

import random
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from offload.errors import DeviceLost, StepError
from offload.gate import Gate
from offload.planning.issue import DEPTH, Chart, Issue, Issued, RunAhead
from offload.running.drivers.cuda import Cuda
from offload.running.drivers.device_loss import device_lost
from offload.running.engines.crew import HOST, Crew, CrewStep, CrewThreads
from offload.running.engines.work import LaneRecord, Record, Run, StepWork

COMPUTE = "compute"
WINDOW_SECONDS = 1e-3
"""How far a stream may be ahead where guests are expected, who wait for what is enqueued."""
SPINS = 32
PAUSE_SECONDS = 50e-6
"""Seconds between two looks at the device, after many looks that saw nothing new."""


@dataclass(slots=True, eq=False)
class PreparedWork:
    """Some work, prepared for streams. It is the same for every step."""

    chart: Chart
    streams: Sequence[Any]
    """By lane of the chart: its stream; None for the host's lanes."""
    for_crew: StepWork
    """The same nodes for the host's threads: a node on the host reports its end, and none has
    successors, because the caller says which node is ready."""
    host_nodes: int
    """How many nodes run on the host."""


@dataclass(slots=True, eq=False)
class StreamStep:
    """The state of one step."""

    work: StepWork
    prepared: PreparedWork
    issue: Issue
    records: Sequence[LaneRecord]
    """By lane of the chart."""
    crew_step: CrewStep
    host_left: int
    timed: list[tuple[LaneRecord, Any, Any]] = field(default_factory=list)
    """For measured steps: the record of each node on a stream, and the events around the node."""
    bases: Mapping[Any, Any] = field(default_factory=dict)
    """By device: the event that its times are counted from."""


class StreamEvents:
    """Events that are used again in every step. A wait means the last record before it."""

    def __init__(self, driver: Cuda) -> None:
        self._driver = driver
        self._of_nodes: dict[tuple[int, int], Any] = {}
        self._ends: dict[str, Any] = {}
        self._timing: dict[tuple[int, int], tuple[Any, Any]] = {}

    def of_node(self, node: int, stream: Any) -> Any:
        """The event of a node number, of any work that has the node on this stream's device."""
        key = node, stream.device_index
        event = self._of_nodes.get(key)
        if event is None:
            event = self._of_nodes[key] = self._driver.event()
        return event

    def end_of(self, lane: str) -> Any:
        """The event at the end of a lane's stream."""
        if lane not in self._ends:
            self._ends[lane] = self._driver.event()
        return self._ends[lane]

    def ends(self) -> Collection[Any]:
        return self._ends.values()

    def timing_pair(self, number: int, stream: Any) -> tuple[Any, Any]:
        """Two events that have times, of this stream's device."""
        key = number, stream.device_index
        if key not in self._timing:
            self._timing[key] = self._driver.event(timing=True), self._driver.event(timing=True)
        return self._timing[key]


class Streams:
    """Runs nodes by a driver, and closes it."""

    captures = False

    def __init__(
        self,
        driver: Cuda,
        order: str = "priority",
        seed: int = 0,
        host_workers: int = 1,
        depth: int = DEPTH,
        clock: Callable[[], float] = time.perf_counter,
        gate: Gate | None = None,
    ) -> None:
        self.measure = False
        """Whether the next steps are timed on the device."""
        self._driver = driver
        self._gate = gate or Gate()
        self._random = random.Random(seed) if order == "random" else None
        self._depth = depth
        self._crew = Crew(clock)
        self._crew_threads = CrewThreads(self._crew, host_workers)
        self._prepared: weakref.WeakKeyDictionary[StepWork, PreparedWork] = (
            weakref.WeakKeyDictionary()
        )
        self._events = StreamEvents(driver)
        self._done: deque[int] = deque()
        """Host nodes that have ended."""
        self._clean = True
        """Whether the last step has ended."""
        self._lost: DeviceLost | None = None

    def run(self, work: StepWork, record: Record) -> None:
        self.check()
        self._clean = False
        state: StreamStep | None = None
        try:
            state = self._begin(work, record)
            while state.issue.unissued or state.host_left:
                if self._gate.wanted:
                    self._gate.pass_on()
                issued = state.issue.next()
                if issued is not None:
                    self._enqueue(state, issued)
                else:
                    self._poll(state, record)
            self._end(state, record)
        except BaseException as error:
            self._fail(error, state, record)
            raise
        self._clean = True

    def _begin(self, work: StepWork, record: Record) -> StreamStep:
        """Make the state of a step. Nothing of another one runs now."""
        prepared = self._prepared.get(work)
        if prepared is None:
            prepared = self._prepared[work] = self._prepare(work)
        crew, chart = self._crew, prepared.chart
        self._done.clear()
        rank = list(range(len(work.runs)))
        if self._random is not None:
            self._random.shuffle(rank)
        records = [LaneRecord(lane) for lane in chart.lanes]
        lanes = [HOST] if HOST in chart.lanes else []
        workers = {lane: self._crew_threads.workers_of(lane) for lane in lanes}
        step = CrewStep(
            work=prepared.for_crew,
            workers=workers,
            rank=rank,
            node_of=sorted(range(len(rank)), key=rank.__getitem__),
            pending=[],
            heaps={lane: [] for lane in lanes},
            left=prepared.host_nodes,
        )
        record.timed = False
        record.lanes += [ran for ran in records if ran.name != HOST]
        with crew.lock:
            if crew.closed:
                raise StepError("this engine is closed; make a new runner")
            for worker in crew.threads():
                worker.idle, worker.busy, worker.ran = True, False, LaneRecord(worker.name)
                record.lanes.append(worker.ran)
            crew.step = step
        armed = self._gate.armed and work.seconds
        window = RunAhead(WINDOW_SECONDS, work.seconds) if armed else None
        threads = {HOST: self._crew_threads.host_workers}
        issue = Issue(chart, self._depth, threads, rank, window)
        self._driver.begin()
        return StreamStep(work, prepared, issue, records, step, prepared.host_nodes)

    def _prepare(self, work: StepWork) -> PreparedWork:
        chart = Chart.from_lanes(work.lane_of, work.successors, {HOST})
        streams = [
            None if host else self._driver.stream(lane)
            for lane, host in zip(chart.lanes, chart.on_host, strict=True)
        ]
        runs = list(work.runs)
        on_host = [n for n, lane in enumerate(work.lane_of) if lane == HOST]
        for node in on_host:
            runs[node] = partial(_run_on_host, runs[node], node, self._done, self._crew)
        nobody: Sequence[Sequence[int]] = [()] * len(runs)
        for_crew = replace(work, runs=runs, successors=nobody)
        return PreparedWork(chart, streams, for_crew, len(on_host))

    def _enqueue(self, state: StreamStep, issued: Issued) -> None:
        node, prepared = issued.node, state.prepared
        lane = prepared.chart.lane_of[node]
        stream = prepared.streams[lane]
        if stream is None:
            with self._crew.lock:
                state.crew_step.make_ready(node)
            return
        driver, ran, clock = self._driver, state.records[lane], self._crew.clock
        for dep in issued.waits:
            driver.wait(stream, self._event_of(prepared, dep))
        ran.nodes.append(node)
        ran.starts.append(clock())
        if self.measure:
            self._enqueue_timed(state, ran, stream, state.work.runs[node])
        else:
            driver.enqueue(stream, state.work.runs[node])
        ran.ends.append(clock())
        if issued.mark:
            self._event_of(prepared, node).record(stream)

    def _event_of(self, prepared: PreparedWork, node: int) -> Any:
        return self._events.of_node(node, prepared.streams[prepared.chart.lane_of[node]])

    def _enqueue_timed(self, state: StreamStep, ran: LaneRecord, stream: Any, run: Run) -> None:
        first, last = self._events.timing_pair(len(state.timed), stream)
        first.record(stream)
        state.bases = state.bases or self._driver.bases(first, stream.device)
        self._driver.enqueue(stream, run)
        last.record(stream)
        state.timed.append((ran, first, last))

    def _poll(self, state: StreamStep, record: Record) -> None:
        """Look at the device until something is complete."""
        issue, prepared, done, step = state.issue, state.prepared, self._done, state.crew_step
        looks = 0
        while True:
            completed = [n for n in issue.marks() if self._event_of(prepared, n).is_done()]
            while done:
                completed.append(done.popleft())
                state.host_left -= 1
            for node in completed:
                issue.complete(node)
            with self._crew.lock:
                failed, error, step.error = step.failed, step.error, None
            if error is not None:
                record.failed = failed
                try:
                    raise error
                finally:
                    del error  # it refers to this frame
            if completed or self._gate.wanted:
                return
            looks += 1
            if looks > SPINS:
                self._crew.caller.bell.acquire(timeout=PAUSE_SECONDS)

    def _end(self, state: StreamStep, record: Record) -> None:
        """Wait until host memory is free to use. What the caller then does on the device comes
        after the step."""
        for stream, ran in zip(state.prepared.streams, state.records, strict=True):
            if stream is not None and not ran.name.startswith(COMPUTE):
                self._events.end_of(ran.name).record(stream)
        self._driver.end()
        for event in self._events.ends():
            self._wait_for(event)
        self._crew.wait_idle()
        if state.timed:
            self._driver.synchronize()
            _write_times(state, record)

    def _wait_for(self, event: Any) -> None:
        looks = 0
        while not event.is_done():
            looks += 1
            if looks > SPINS:
                self._crew.caller.bell.acquire(timeout=PAUSE_SECONDS)

    def _drain(self) -> BaseException | None:
        """Wait for the streams, and return the error that the device reports."""
        reported: BaseException | None = None
        for call in (self._driver.end, self._driver.synchronize):
            try:
                call()
            except Exception as error:
                reported = reported or error
        return reported

    def _fail(self, error: BaseException, state: StreamStep | None, record: Record) -> None:
        """End a step that failed. Raises `DeviceLost` if the device is lost."""
        if record.failed is None:
            records = state.records if state else ()
            begun = [ran.nodes[-1] for ran in records if len(ran.nodes) > len(ran.ends)]
            record.failed = begun[0] if begun else None
        if state and record.failed is None and isinstance(error, Exception):
            record.under_way = state.issue.under_way()
        self._run_dry(error)

    def _run_dry(self, error: BaseException | None = None) -> None:
        """Wait until nothing of the step runs. Raises `DeviceLost` if `error`, or what the device
        reports now, says so."""
        self._clean = False
        self._crew.wait_idle()
        late = self._drain()
        self._clean = True
        for reported in (error, late):
            lost = reported and device_lost(reported, *self._driver.devices)
            if lost:
                self._lost = lost
                raise lost from reported

    def check(self) -> None:
        """Before a step: raise if the device is lost. Also wait for what is left of a failed step,
        in case a Ctrl-C ended that wait."""
        if self._lost is not None:
            raise DeviceLost(*self._lost.args)
        if not self._clean:
            self._run_dry()

    def fail(self, error: BaseException) -> None:
        """Handle an error that another user of the driver met: wait for the streams, and raise
        `DeviceLost` if the device is lost."""
        self._run_dry(error)

    def pause(self) -> None:
        self._crew.pause()
        self._driver.synchronize()

    def resume(self) -> None:
        self._crew.resume()

    def close(self) -> None:
        try:
            self._crew_threads.close()
        finally:
            if self._lost is None:
                self._driver.close()


def _run_on_host(run: Run, node: int, done: deque[int], crew: Crew) -> None:
    run()
    with crew.lock:
        done.append(node)
        crew.caller.ring()


def _write_times(state: StreamStep, record: Record) -> None:
    """Replace the host's times by the devices', counted from the beginning of the first node."""
    record.timed = True
    zero = min((ran.starts[0] for ran in state.records if ran.starts), default=0.0)
    for ran, stream in zip(state.records, state.prepared.streams, strict=True):
        mine = [(first, last) for owner, first, last in state.timed if owner is ran]
        if mine:
            base = state.bases[stream.device]
            ran.starts = [zero + first.seconds_since(base) for first, _ in mine]
            ran.ends = [zero + last.seconds_since(base) for _, last in mine]
    for ran in state.records:
        if ran.name == COMPUTE:
            between = zip(ran.ends, ran.starts[1:], strict=False)
            record.waited = sum(max(0.0, begin - end) for end, begin in between)
