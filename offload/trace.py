"""What ran when in the last step: for people (Chrome's tracing page, Perfetto) and for costs.

    compute  [F1][F2 ][F3]....[B3]        a row an engine; a curve: bytes in use
    h2d      [w2][w3 ]..[a1]

Always on: an engine notes two times a node (0.15 us), and all else is made when it is asked for.
Times are in seconds of the engine's clock.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from operator import sub
from pathlib import Path
from typing import Any

from offload.engines import Record
from offload.memgraph import TASK, MemGraph
from offload.taskgraph import HOST

PROCESS = 0
MICROSECONDS = 1e6


@dataclass(frozen=True, slots=True)
class Span:
    """A node's time on a row."""

    row: str
    node: int
    start: float
    end: float
    lane: int = 0
    """Which of those that ran one node after the other: of a thread that is every engine, one."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Trace:
    """Of the last step, which may have failed half way."""

    def __init__(self, memgraph: MemGraph | None = None, record: Record | None = None) -> None:
        self._memgraph = memgraph
        self._record = record or Record()

    @property
    def spans(self) -> list[Span]:
        """By start."""
        return sorted(self._spans(), key=lambda span: (span.start, span.node))

    def _spans(self) -> Iterator[Span]:
        for number, lane in enumerate(self._record.lanes):
            for node, start, end in zip(lane.nodes, lane.starts, lane.ends, strict=False):
                row = lane.name or self._known.nodes[node].engine
                yield Span(row, node, start, end, number)

    @property
    def _known(self) -> MemGraph:
        if self._memgraph is None:
            raise ValueError("nothing was traced yet: run a step first")
        return self._memgraph

    @property
    def timed(self) -> bool:
        """Whether a span is when a node ran. Else it is when the host enqueued it, on a device that
        runs it later: see `Runner.measure`."""
        return self._record.timed

    @property
    def memgraph(self) -> MemGraph | None:
        """Of the plan that ran."""
        return self._memgraph

    @property
    def whole(self) -> bool:
        """Whether every node came to its end."""
        ended = sum(len(lane.ends) for lane in self._record.lanes)
        return self._memgraph is not None and ended == len(self._memgraph.nodes) > 0

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        spans = self.spans
        return max(span.end for span in spans) - spans[0].start if spans else 0.0

    @property
    def waited(self) -> float:
        """Seconds in which the compute engine had no kernel that it could run."""
        return self._record.waited

    @property
    def computed(self) -> float:
        """Seconds of kernels of the compute engines. Cheap enough for every step."""
        if any(not lane.name for lane in self._record.lanes):
            return sum(t for row, t in self.busy().items() if row.startswith("compute"))
        lanes = [lane for lane in self._record.lanes if lane.name.startswith("compute")]
        return sum(sum(map(sub, lane.ends, lane.starts)) for lane in lanes)

    def began(self, phase: str) -> bool:
        """Whether a task of this phase did, be it that it failed."""
        return any(
            self._known.nodes[node].kind == TASK
            and self._known.graph.tasks[self._known.nodes[node].task].phase == phase
            for lane in self._record.lanes
            for node, _ in zip(lane.nodes, lane.starts, strict=False)
        )

    def seconds_by_task(self) -> dict[int, float]:
        """Measured, by the number of the task in the graph."""
        nodes = self._known.nodes
        return {
            nodes[span.node].task: span.seconds
            for span in self._spans()
            if nodes[span.node].kind == TASK
        }

    def busy(self) -> dict[str, float]:
        """Seconds by row."""
        busy: dict[str, float] = {}
        for span in self._spans():
            busy[span.row] = busy.get(span.row, 0.0) + span.seconds
        return busy

    def bytes_in_use(self) -> list[tuple[float, int, int]]:
        """(time, device, bytes of its arena that hold something) at every change."""
        span_of = {span.node: span for span in self._spans()}
        if not span_of:
            return []
        begin = min(span.start for span in span_of.values())
        changes: list[tuple[float, int, int]] = []
        for block in self._known.blocks:
            if block.place.arena == HOST:
                continue
            touched = [span_of[node] for node in block.nodes if node in span_of]
            if not touched and not block.from_start:
                continue
            start = begin if block.from_start else min(span.start for span in touched)
            changes.append((start, block.place.arena, block.place.nbytes))
            if not block.to_end and len(touched) == len(block.nodes):
                last = max((span.end for span in touched), default=begin)
                changes.append((last, block.place.arena, -block.place.nbytes))
        changes.sort()  # at the same moment what falls free comes first
        now: dict[int, int] = {}
        curve: list[tuple[float, int, int]] = []
        for time, device, change in changes:
            now[device] = now.get(device, 0) + change
            curve.append((time, device, now[device]))
        return curve

    def save(self, path: str | Path) -> None:
        """In Chrome's trace format: open it at ui.perfetto.dev or chrome://tracing."""
        spans = self.spans
        zero = spans[0].start if spans else 0.0
        rows = {row: number for number, row in enumerate(sorted({span.row for span in spans}))}
        events = [_label("process_name", 0, "offload: one step")]
        events += [_label("thread_name", number, row) for row, number in rows.items()]
        events += [self._event(span, rows[span.row], zero) for span in spans]
        events += [
            {
                "name": f"bytes in use on device {device}",
                "ph": "C",
                "pid": PROCESS,
                "ts": (time - zero) * MICROSECONDS,
                "args": {"bytes": nbytes},
            }
            for time, device, nbytes in self.bytes_in_use()
        ]
        document = {"traceEvents": events, "displayTimeUnit": "ms"}
        Path(path).write_text(json.dumps(document), encoding="utf-8")

    def _event(self, span: Span, row: int, zero: float) -> dict[str, Any]:
        known = self._known
        node = known.nodes[span.node]
        task = known.graph.tasks[node.task] if node.kind == TASK else None
        args: dict[str, Any] = {
            "node": span.node,
            "bytes": node.nbytes or sum(a.place.nbytes for a in node.accesses),
            "at": [_described(known, access) for access in node.accesses],
        }
        if task is not None:
            args |= {"where": task.where, "phase": task.phase}
        return {
            "name": known.name(span.node),
            "cat": node.kind,
            "ph": "X",
            "pid": PROCESS,
            "tid": row,
            "ts": (span.start - zero) * MICROSECONDS,
            "dur": span.seconds * MICROSECONDS,
            "args": args,
        }


def _described(memgraph: MemGraph, access: Any) -> str:
    place = access.place
    name = "workspace" if access.buffer is None else memgraph.graph.buffers[access.buffer].name
    how = ("r" if access.reads else "") + ("w" if access.writes else "")
    arena = "host" if place.arena == HOST else f"device {place.arena}"
    return f"{name} {how} {arena} [{place.offset}, {place.offset + place.nbytes})"


def _label(kind: str, row: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": PROCESS, "tid": row, "args": {"name": name}}
