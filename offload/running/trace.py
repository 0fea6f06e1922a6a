"""What ran when in the last step, as a picture (Chrome's tracing page, Perfetto) and as seconds.

    compute  [F1][F2 ][F3]....[B3]        one row a lane; a curve shows the bytes in use
    h2d      [w2][w3 ]..[a1]

It is always on: an engine notes two times a node (0.15 us). Everything else is made when it is
asked for. Times are seconds of the engine's clock.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from operator import sub
from pathlib import Path
from typing import Any

from offload.graph.memgraph import TASK, MemGraph
from offload.graph.taskgraph import HOST
from offload.running.engines.work import Record

PROCESS = 0
MICROSECONDS = 1e6


@dataclass(frozen=True, slots=True)
class Span:
    """The time of one node on a row."""

    row: str
    node: int
    start: float
    end: float
    worker: int = 0
    """Nodes of one worker ran one after the other. A thread that is every lane is one worker."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Trace:
    """The trace of the last step, which may have failed half way."""

    def __init__(self, memgraph: MemGraph | None = None, record: Record | None = None) -> None:
        self._memgraph = memgraph
        self._record = record or Record()

    @property
    def spans(self) -> list[Span]:
        """The spans by their start."""
        return sorted(self._spans(), key=lambda span: (span.start, span.node))

    def _spans(self) -> Iterator[Span]:
        for number, ran in enumerate(self._record.lanes):
            for node, start, end in zip(ran.nodes, ran.starts, ran.ends, strict=False):
                row = ran.name or self._require_memgraph.nodes[node].lane
                yield Span(row, node, start, end, number)

    @property
    def _require_memgraph(self) -> MemGraph:
        if self._memgraph is None:
            raise ValueError("there is no trace yet; run a step first")
        return self._memgraph

    @property
    def timed(self) -> bool:
        """Whether spans are the times at which nodes ran. If not, they are the times at which the
        host enqueued the nodes on a device that ran them later; see `Runner.measure`."""
        return self._record.timed

    @property
    def memgraph(self) -> MemGraph | None:
        """The MemGraph of the plan that ran."""
        return self._memgraph

    @property
    def whole(self) -> bool:
        """Whether every node has ended."""
        ended = sum(len(ran.ends) for ran in self._record.lanes)
        return self._memgraph is not None and ended == len(self._memgraph.nodes) > 0

    @property
    def seconds(self) -> float:
        """Seconds from the first start to the last end."""
        spans = self.spans
        return max(span.end for span in spans) - spans[0].start if spans else 0.0

    @property
    def waited(self) -> float:
        """Seconds in which the compute lane had no kernel that could run."""
        return self._record.waited

    @property
    def computed(self) -> float:
        """Seconds of kernels on the compute lanes. This is cheap enough for every step."""
        total = 0.0
        for ran in self._record.lanes:
            if ran.name.startswith("compute"):
                total += sum(map(sub, ran.ends, ran.starts))
            elif not ran.name:
                nodes = self._require_memgraph.nodes
                for node, start, end in zip(ran.nodes, ran.starts, ran.ends, strict=False):
                    if nodes[node].lane.startswith("compute"):
                        total += end - start
        return total

    def busy(self) -> dict[str, float]:
        """Seconds of work by row."""
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
        for block in self._require_memgraph.blocks:
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
        changes.sort()  # at the same moment, bytes are freed before others are taken
        now: dict[int, int] = {}
        curve: list[tuple[float, int, int]] = []
        for time, device, change in changes:
            now[device] = now.get(device, 0) + change
            curve.append((time, device, now[device]))
        return curve

    def save(self, path: str | Path) -> None:
        """Write Chrome's trace format; open the file at ui.perfetto.dev or chrome://tracing."""
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
        known = self._require_memgraph
        node = known.nodes[span.node]
        task = known.graph.tasks[node.task] if node.kind == TASK else None
        args: dict[str, Any] = {
            "node": span.node,
            "bytes": node.nbytes or sum(a.place.nbytes for a in node.accesses),
            "at": [_describe_access(known, access) for access in node.accesses],
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


def _describe_access(memgraph: MemGraph, access: Any) -> str:
    place = access.place
    name = "workspace" if access.buffer is None else memgraph.graph.buffers[access.buffer].name
    how = ("r" if access.reads else "") + ("w" if access.writes else "")
    arena = "host" if place.arena == HOST else f"device {place.arena}"
    return f"{name} {how} {arena} [{place.offset}, {place.offset + place.nbytes})"


def _label(kind: str, row: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": PROCESS, "tid": row, "args": {"name": name}}
