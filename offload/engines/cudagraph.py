"""A step captured once, kernels, copies and all their edges, and replayed without the host.

    step 1   as engine `cuda`: handles, workspaces and kernels are loaded
    step 2   each segment captured on the streams          segments.py: cut where the host must act
    step 2.. refresh numbers | replay | host tasks | replay | ...        one launch a segment

A graph is of the numbers that were baked into it. They are compared before every replay: where
one has changed, that step runs as engine `cuda`, and the next one is captured again. Where a step
cannot be captured it is said once, with the task and the user's line, and engine `cuda` runs it
from then on.
"""

import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from offload.drivers.capturing import Capturing
from offload.engines import Lane, Record, Run, Work
from offload.engines.segments import Segment, segments
from offload.engines.streams import COMPUTE, HOST_ENGINES, Streams

RESTLESS = 3
"""Steps in a row, each with other numbers than the one before, after which it is said."""
ROW = "graph"
"""In a trace."""


@dataclass(slots=True, eq=False)
class Known:
    """Some work, and what was captured of it."""

    segments: Sequence[Segment]
    hosted: Mapping[int, Work]
    """By the number of a segment, the nodes of the host as work of their own."""
    copies: bool
    """Whether its streams touch host memory."""
    baked: Hashable = None
    graphs: Mapping[int, Run] | None = None
    """By the number of a segment."""
    changes: int = 0
    """Steps in a row with other numbers than before."""
    impossible: bool = False


@dataclass(slots=True, eq=False)
class _At:
    """How far a capture is."""

    node: int | None = None
    events: dict[int, Any] = field(default_factory=dict)


class CudaGraph:
    """Over the engine `cuda` and its driver, which that one closes."""

    def __init__(
        self,
        driver: Capturing,
        streams: Streams,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._driver = driver
        self._streams = streams
        self._clock = clock
        self._known: weakref.WeakKeyDictionary[Work, Known] = weakref.WeakKeyDictionary()
        self._tail: Any = None

    @property
    def measure(self) -> bool:
        """The next steps run as engine `cuda`, which times nodes: a replay does not know them."""
        return self._streams.measure

    @measure.setter
    def measure(self, on: bool) -> None:
        self._streams.measure = on

    def run(self, work: Work, record: Record) -> None:
        self._streams.check()
        known = self._known.get(work)
        if known is None:
            known = self._known[work] = read(work)
            if known.impossible:
                self._say(work, work.uncaptured)
        if not known.impossible and not self.measure and self._ready(work, known):
            self._replay(known, record)
        else:
            self._streams.run(work, record)

    def _ready(self, work: Work, known: Known) -> bool:
        """Whether there are graphs of today's numbers."""
        baked = work.baked(), flags()
        if known.baked != baked:
            known.changes += known.baked is not None
            known.baked, known.graphs = baked, None
            if known.changes == RESTLESS:
                work.tell(
                    "engine cudagraph: numbers that a graph keeps (betas, momentum, weight decay,"
                    f" precision, ...) changed {RESTLESS} times in a row; steps in which one"
                    " changes run as engine cuda"
                )
            return False
        known.changes = 0
        if known.graphs is None:
            known.graphs = self._captured(work, known)
        return known.graphs is not None

    # ---- capture ----------------------------------------------------------------------------

    def _captured(self, work: Work, known: Known) -> Mapping[int, Run] | None:
        at = _At()
        others = [(other, other.graphs) for other in self._known.values()]
        for other, _ in others:
            other.graphs = None  # until this one is over: none is replayed after one that broke
        try:
            self._driver.begin()
            made = {
                number: self._capture(work, segment, at)
                for number, segment in enumerate(known.segments)
                if segment.captured
            }
            self._driver.end()
        except BaseException as error:
            try:
                self._driver.drop_capture()
            finally:
                self._streams.fail(error)
            if not isinstance(error, Exception):
                raise
            self._refused(work, known, at, error)
            return None
        for other, graphs in others:
            other.graphs = graphs
        return made

    def _refused(self, work: Work, known: Known, at: _At, error: Exception) -> None:
        known.impossible = True
        where = f" in {work.name(at.node)}" if at.node is not None else ""
        said = (str(error).splitlines() or [""])[0]
        self._say(work, f"{type(error).__name__}: {said[:300]}", where)

    def _say(self, work: Work, why: str, where: str = "") -> None:
        work.tell(
            f"engine cudagraph: this step cannot be captured{where}: {why}. Engine cuda runs it"
        )

    def _capture(self, work: Work, segment: Segment, at: _At) -> Run:
        driver, names = self._driver, {work.engines[node] for node in segment.nodes}
        streams = {name: driver.stream(name) for name in sorted({COMPUTE, *names})}
        origin = streams[COMPUTE]
        awaited = _awaited(work, segment)
        marked = {dep for deps in awaited.values() for dep in deps}
        at.node, at.events = None, {}
        driver.begin_capture(origin)
        fork = driver.event()
        fork.record(origin)
        for stream in streams.values():
            if stream is not origin:
                driver.wait(stream, fork)
        behind: dict[tuple[str, str], int] = {}
        for node in segment.nodes:
            at.node, engine = node, work.engines[node]
            stream = streams[engine]
            for dep in sorted(awaited[node], reverse=True):
                other = work.engines[dep]
                if behind.get((engine, other), -1) < dep:
                    driver.wait(stream, at.events[dep])
                    behind[engine, other] = dep
            driver.enqueue(stream, work.runs[node])
            if node in marked:
                at.events[node] = driver.event()
                at.events[node].record(stream)
        at.node = None
        for stream in streams.values():
            if stream is not origin:
                joined = driver.event()
                joined.record(stream)
                driver.wait(origin, joined)
        return driver.end_capture()

    # ---- replay -----------------------------------------------------------------------------

    def _replay(self, known: Known, record: Record) -> None:
        record.timed = False
        lane = Lane(ROW)
        record.lanes.append(lane)
        assert known.graphs is not None
        waits = known.copies or bool(known.hosted)
        for number, segment in enumerate(known.segments):
            if segment.captured:
                lane.nodes.extend(segment.nodes)
                lane.starts.extend([self._clock()] * len(segment.nodes))
                self._launch(known.graphs[number], lane, waits)
            else:
                self._host(known.hosted[number], segment, record)

    def _launch(self, graph: Run, lane: Lane, waits: bool) -> None:
        """Its nodes have run, as far as anybody can say, once they are launched. `waits`: until it
        is over, as host memory is the caller's again then."""
        driver = self._driver
        try:
            origin = driver.stream(COMPUTE)
            driver.begin()
            driver.enqueue(origin, graph)
            lane.ends.extend([self._clock()] * (len(lane.nodes) - len(lane.ends)))
            if waits:
                self._tail = self._tail or driver.event()
                self._tail.record(origin)
            driver.end()
            if waits:
                self._tail.synchronize()
        except BaseException as error:
            if isinstance(error, Exception):
                error.add_note("in a captured step, which runs as one: engine cuda names the task")
            self._streams.fail(error)
            raise

    def _host(self, hosted: Work, segment: Segment, record: Record) -> None:
        """Its nodes on the threads that engine `cuda` has for them."""
        mine = Record()
        try:
            self._streams.run(hosted, mine)
        finally:
            for lane in mine.lanes:
                lane.nodes = [segment.nodes[node] for node in lane.nodes]
            record.lanes += mine.lanes
            record.failed = None if mine.failed is None else segment.nodes[mine.failed]

    def close(self) -> None:
        self._known.clear()
        self._streams.close()


def read(work: Work) -> Known:
    """Where it is cut."""
    deps: list[list[int]] = [[] for _ in work.runs]
    for node, after in enumerate(work.successors):
        for later in after:
            deps[later].append(node)
    captured = [engine not in HOST_ENGINES for engine in work.engines]
    cut = segments(captured, deps)
    hosted = {n: _part(work, s, deps) for n, s in enumerate(cut) if not s.captured}
    copies = any(not e.startswith(COMPUTE) for e in work.lanes)
    return Known(cut, hosted, copies, impossible=bool(work.uncaptured))


def _part(work: Work, segment: Segment, deps: Sequence[Sequence[int]]) -> Work:
    """Of a segment's nodes alone, numbered from zero on."""
    place = {node: n for n, node in enumerate(segment.nodes)}
    inner = [[place[dep] for dep in deps[node] if dep in place] for node in segment.nodes]
    successors: list[list[int]] = [[] for _ in inner]
    for node, before in enumerate(inner):
        for dep in before:
            successors[dep].append(node)
    engines = tuple(work.engines[node] for node in segment.nodes)
    return replace(
        work,
        runs=tuple(work.runs[node] for node in segment.nodes),
        engines=engines,
        waits=tuple(map(len, inner)),
        successors=tuple(map(tuple, successors)),
        first=tuple(node for node, before in enumerate(inner) if not before),
        lanes=tuple(dict.fromkeys(engines)),
    )


def _awaited(work: Work, segment: Segment) -> Mapping[int, Sequence[int]]:
    """Of every node those on other streams that it waits for, within the segment."""
    found: dict[int, list[int]] = {node: [] for node in segment.nodes}
    for node in segment.nodes:
        for later in work.successors[node]:
            if later in found and work.engines[later] != work.engines[node]:
                found[later].append(node)
    return found


def flags() -> Hashable:
    """What torch reads at every call to choose a kernel, and a graph keeps. (Which attention runs
    was chosen when the step was traced; `cudnn.benchmark` is off in every step.)"""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return (
        cuda.matmul.fp32_precision,
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
        cuda.matmul.allow_fp16_accumulation,
        getattr(cuda.matmul, "prefer_cublaslt_grouped_gemm", None),  # later than torch 2.11
        cuda.preferred_blas_library(),
        cuda.preferred_linalg_library(),
        cudnn.conv.fp32_precision,  # pyright: ignore[reportAttributeAccessIssue]
        cudnn.rnn.fp32_precision,
        cudnn.enabled,
        cudnn.deterministic,
        getattr(cudnn, "depthwise_kernel", None),  # later than torch 2.11
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch._C._get_deterministic_fill_uninitialized_memory(),
        torch.get_default_dtype(),
    )
