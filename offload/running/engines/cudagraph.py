"""A step captured once, kernels, copies and all their edges, and replayed without the host.

    step 1   as engine `cuda`: handles, workspaces and kernels are loaded
    step 2   each piece captured on the streams            planning/cuts.py: where the host must act
    step 2.. replay | host tasks | replay | ...                            one launch a piece

A graph keeps torch's precision flags. They are compared before every replay: where one has changed,
that step runs as engine `cuda`, and the next one is captured again. If a step cannot be captured, a
warning says so once, with the task and the user's line, and engine `cuda` runs it from then on.
"""

import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from offload.gate import Gate
from offload.planning.cuts import Piece, cut_by_host, shorten_pieces
from offload.running.drivers.cuda_graph import GraphCuda
from offload.running.engines.crew import HOST
from offload.running.engines.streams import COMPUTE, Streams
from offload.running.engines.work import LaneRecord, Record, Run, StepWork, run_part
from offload.torch_seams import (
    bf16_reduced_precision,
    float32_precisions,
    fp16_reduced_precision,
)

PIECE_SECONDS = 2e-3
"""The compute seconds of a graph where guests are expected. All streams meet at its end."""
ROW = "graph"
"""The name of its row in a trace."""


@dataclass(slots=True, eq=False)
class CaptureState:
    """What is known of some work: where it is cut, and what was captured of it."""

    pieces: Sequence[Piece]
    hosted: Mapping[int, StepWork]
    """By the number of a piece, the nodes of the host as work of their own."""
    copies: bool
    """Whether its streams touch the host's memory."""
    cut: bool = False
    """Whether it is cut for guests, too."""
    flags: Hashable = None
    """The flags that its graphs were captured with."""
    graphs: Mapping[int, Run] | None = None
    """By the number of a piece."""
    impossible: bool = False


@dataclass(slots=True, eq=False)
class _CaptureProgress:
    """How far a capture has come."""

    node: int | None = None
    events: dict[int, Any] = field(default_factory=dict)


class CudaGraph:
    """Captures and replays steps. What it cannot replay, the engine `cuda` runs, which owns the
    driver and closes it."""

    captures = True

    def __init__(
        self,
        driver: GraphCuda,
        streams: Streams,
        gate: Gate | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._driver = driver
        self._gate = gate or Gate()
        self._streams = streams
        self._clock = clock
        self._known: weakref.WeakKeyDictionary[StepWork, CaptureState] = weakref.WeakKeyDictionary()
        self._last_event: Any = None

    @property
    def measure(self) -> bool:
        """The next steps run as engine `cuda`, which times nodes: a replay does not know them."""
        return self._streams.measure

    @measure.setter
    def measure(self, on: bool) -> None:
        self._streams.measure = on

    def run(self, work: StepWork, record: Record) -> None:
        self._streams.check()
        known = self._known.get(work)
        if known is None or known.cut != self._gate.armed:
            known = self._known[work] = cut_work(work, self._gate.armed)
            if known.impossible:
                self._report(work, work.uncaptured)
        if not known.impossible and not self.measure and self._prepare(work, known):
            self._replay(known, record)
        else:
            self._streams.run(work, record)

    def _prepare(self, work: StepWork, known: CaptureState) -> bool:
        """Whether there are graphs for the present flags. They are captured at the second step with
        these flags."""
        now = flags()
        if known.flags != now:
            known.flags, known.graphs = now, None
            return False
        if known.graphs is None:
            known.graphs = self._capture_pieces(work, known)
        return known.graphs is not None

    # ---- capture ----------------------------------------------------------------------------

    def _capture_pieces(self, work: StepWork, known: CaptureState) -> Mapping[int, Run] | None:
        progress = _CaptureProgress()
        others = [(other, other.graphs) for other in self._known.values()]
        for other, _ in others:
            other.graphs = None  # until this one is over: none is replayed after one that broke
        try:
            self._driver.begin()
            made = {
                number: self._capture(work, piece, progress)
                for number, piece in enumerate(known.pieces)
                if not piece.on_host
            }
            self._driver.end()
        except BaseException as error:
            try:
                self._driver.drop_capture()
            finally:
                self._streams.fail(error)
            if not isinstance(error, Exception):
                raise
            self._refuse(work, known, progress, error)
            return None
        for other, graphs in others:
            other.graphs = graphs
        return made

    def _refuse(
        self, work: StepWork, known: CaptureState, progress: _CaptureProgress, error: Exception
    ) -> None:
        known.impossible = True
        where = f" in {work.name(progress.node)}" if progress.node is not None else ""
        message = (str(error).splitlines() or [""])[0]
        self._report(work, f"{type(error).__name__}: {message[:300]}", where)

    def _report(self, work: StepWork, why: str, where: str = "") -> None:
        work.report(
            f"engine cudagraph: this step cannot be captured{where}: {why}. Engine cuda runs it"
        )

    def _capture(self, work: StepWork, piece: Piece, progress: _CaptureProgress) -> Run:
        driver, names = self._driver, {work.lane_of[node] for node in piece.nodes}
        streams = {name: driver.stream(name) for name in sorted({COMPUTE, *names})}
        origin = streams[COMPUTE]
        awaited = _find_awaited(work, piece)
        marked = {dep for deps in awaited.values() for dep in deps}
        progress.node, progress.events = None, {}
        driver.begin_capture(origin)
        fork = driver.event()
        fork.record(origin)
        for stream in streams.values():
            if stream is not origin:
                driver.wait(stream, fork)
        behind: dict[tuple[str, str], int] = {}
        for node in piece.nodes:
            progress.node, lane = node, work.lane_of[node]
            stream = streams[lane]
            for dep in sorted(awaited[node], reverse=True):
                other = work.lane_of[dep]
                if behind.get((lane, other), -1) < dep:
                    driver.wait(stream, progress.events[dep])
                    behind[lane, other] = dep
            driver.enqueue(stream, work.runs[node])
            if node in marked:
                progress.events[node] = driver.event()
                progress.events[node].record(stream)
        progress.node = None
        for stream in streams.values():
            if stream is not origin:
                joined = driver.event()
                joined.record(stream)
                driver.wait(origin, joined)
        return driver.end_capture()

    # ---- replay -----------------------------------------------------------------------------

    def _replay(self, known: CaptureState, record: Record) -> None:
        record.timed = False
        ran = LaneRecord(ROW)
        record.lanes.append(ran)
        assert known.graphs is not None
        waits = known.copies or bool(known.hosted) or known.cut
        for number, piece in enumerate(known.pieces):
            if self._gate.wanted:
                self._gate.pass_on()
            if piece.on_host:
                run_part(self._streams, known.hosted[number], record, piece.nodes)
            else:
                ran.nodes.extend(piece.nodes)
                ran.starts.extend([self._clock()] * len(piece.nodes))
                self._launch(known.graphs[number], ran, waits)

    def _launch(self, graph: Run, ran: LaneRecord, waits: bool) -> None:
        """Replay one piece. Once it is launched, its nodes count as run. `waits`: return when it is
        over, because the host's memory is the caller's again then."""
        driver = self._driver
        try:
            origin = driver.stream(COMPUTE)
            driver.begin()
            driver.enqueue(origin, graph)
            ran.ends.extend([self._clock()] * (len(ran.nodes) - len(ran.ends)))
            if waits:
                self._last_event = self._last_event or driver.event()
                self._last_event.record(origin)
            driver.end()
            if waits:
                self._last_event.synchronize()
        except BaseException as error:
            if isinstance(error, Exception):
                error.add_note("in a captured step, which runs as one: engine cuda names the task")
            self._streams.fail(error)
            raise

    def pause(self) -> None:
        self._streams.pause()

    def resume(self) -> None:
        self._streams.resume()

    def close(self) -> None:
        self._known.clear()
        self._streams.close()


def cut_work(work: StepWork, cut: bool = False) -> CaptureState:
    """Cut the work into pieces of the device and pieces of the host. `cut`: those of the device are
    short, so that guests do not wait long."""
    on_host = [n in work.varying or lane == HOST for n, lane in enumerate(work.lane_of)]
    pieces = cut_by_host(on_host, work.dependencies())
    if cut and work.seconds:
        busy = [
            took if lane.startswith(COMPUTE) else 0.0
            for took, lane in zip(work.seconds, work.lane_of, strict=True)
        ]
        pieces = shorten_pieces(pieces, busy, PIECE_SECONDS)
    hosted = {n: work.part(piece.nodes) for n, piece in enumerate(pieces) if piece.on_host}
    copies = any(not lane.startswith((COMPUTE, "d2d")) for lane in work.lanes)
    return CaptureState(pieces, hosted, copies, cut, impossible=bool(work.uncaptured))


def _find_awaited(work: StepWork, piece: Piece) -> Mapping[int, Sequence[int]]:
    """For every node, the nodes of this piece on other streams that it waits for."""
    awaited: dict[int, list[int]] = {node: [] for node in piece.nodes}
    for node in piece.nodes:
        for later in work.successors[node]:
            if later in awaited and work.lane_of[later] != work.lane_of[node]:
                awaited[later].append(node)
    return awaited


def flags() -> Hashable:
    """The settings of torch that choose a kernel at every call, which a graph keeps as they were.
    (Which attention runs was chosen when the step was traced; `cudnn.benchmark` is always off.)"""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return (
        float32_precisions(),
        fp16_reduced_precision(),
        bf16_reduced_precision(),
        cuda.matmul.allow_fp16_accumulation,
        getattr(cuda.matmul, "prefer_cublaslt_grouped_gemm", None),  # later than torch 2.11
        cuda.preferred_blas_library(),
        cuda.preferred_linalg_library(),
        cudnn.enabled,
        cudnn.deterministic,
        getattr(cudnn, "depthwise_kernel", None),  # later than torch 2.11
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # pyright: ignore[reportAttributeAccessIssue]
        torch.get_default_dtype(),
    )
