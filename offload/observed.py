"""What a plan's first steps took, node by node, and the costs that come of it. Pure.

    compute  |F1 |..F2   |     F2 could begin when F1 was over: what the loop took is F2's
    h2d      | w2 |w3  |       w3 was slowed down by a1: what it would have taken alone counts
    d2h            |a1 |

A node takes what passes from when it could have begun (all that it waits for is over, its lane is
free) to its end. So a simulation with these seconds is the measured step again, and of another plan
of the same tasks it is what to expect. The median step of each node counts.

Tasks are known by name and engine: a plan of other nodes has the same tasks.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Protocol

from offload.costs import Costs
from offload.memgraph import OFFLOAD, RELOAD, TASK, MemGraph
from offload.rates import Sample, link
from offload.simulator import other_way
from offload.taskgraph import Task, TaskGraph


class Span(Protocol):
    """A node's time (trace.py)."""

    @property
    def lane(self) -> int:
        """Nodes of one lane ran one after the other."""
        ...

    @property
    def node(self) -> int: ...

    @property
    def start(self) -> float: ...

    @property
    def end(self) -> float: ...


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """Of one plan."""

    steps: int
    seconds: float
    """Of a step, from the first start to the last end: the median."""
    tasks: Mapping[tuple[str, str], float]
    """By engine and name."""
    copies: Mapping[str, Sequence[tuple[int, float]]]
    """By kind: the bytes of each, and the seconds that it would take alone."""
    host_traffic: int
    """Bytes of tasks on the host."""
    host_seconds: float

    def on(self, graph: TaskGraph) -> TaskGraph:
        """The same graph with these seconds where a task was seen; one that is run once more takes
        as long as it did before. Whoever runs the one has notes for the other, too."""
        made = graph.with_tasks(
            [
                replace(task, seconds=self.tasks.get((task.engine, _name(task)), task.seconds))
                for task in graph.tasks
            ]
        )
        made.notes = graph.notes
        return made

    def costs(self, costs: Costs) -> Costs:
        """With the rates of the copies and of the host that were seen; what was not seen stays."""
        seen = {kind: copies for kind, copies in self.copies.items() if sum(b for b, _ in copies)}
        fixed = [_fixed(copies, costs.copy) for copies in seen.values()]
        copy = sum(fixed) / len(fixed) if fixed else costs.copy
        rates = {kind: _rate(copies, copy) for kind, copies in seen.items()}
        found = replace(
            costs, copy=copy, h2d=rates.get(RELOAD, costs.h2d), d2h=rates.get(OFFLOAD, costs.d2h)
        )
        if self.host_traffic and self.host_seconds > 0:
            found = replace(found, host_memory=self.host_traffic / self.host_seconds)
        return found


def _fixed(copies: Sequence[tuple[int, float]], believed: float) -> float:
    """What a copy of nothing would take: by the line through the smaller and the larger half. Where
    all are of one size, what was believed, if they leave room for it."""
    by_size = sorted(copies)
    small, large = (_mean(half) for half in _halves(by_size))
    least = min(seconds for _, seconds in copies)
    if large.amount < 2 * small.amount:
        return min(believed, least / 2)
    return min(link(small, large).fixed, least)


def _halves(
    copies: Sequence[tuple[int, float]],
) -> tuple[Sequence[tuple[int, float]], Sequence[tuple[int, float]]]:
    middle = len(copies) // 2
    return copies[:middle] or copies, copies[middle:]


def _mean(copies: Sequence[tuple[int, float]]) -> Sample:
    count = len(copies)
    return Sample(sum(b for b, _ in copies) / count, [sum(s for _, s in copies) / count])


def _rate(copies: Sequence[tuple[int, float]], fixed: float) -> float:
    """All of them together take what they took."""
    seconds = sum(s for _, s in copies)
    return sum(b for b, _ in copies) / max(seconds - len(copies) * fixed, seconds / 100)


def observe(memgraph: MemGraph, steps: Sequence[Sequence[Span]], shared: float = 1.0) -> Observed:
    """`steps`: the spans of each, of whole steps. `shared`: see `Costs`."""
    nodes = memgraph.nodes
    took: dict[int, list[float]] = defaultdict(list)
    for spans in steps:
        for node, seconds in _took(memgraph, spans, shared):
            took[node].append(seconds)
    typical = {node: median(seconds) for node, seconds in took.items()}
    tasks: dict[tuple[str, str], list[float]] = defaultdict(list)
    copies: dict[str, list[tuple[int, float]]] = defaultdict(list)
    traffic, on_host = 0, 0.0
    for number, seconds in typical.items():
        node = nodes[number]
        if node.kind != TASK:
            copies[node.kind].append((node.nbytes, seconds))
            continue
        task = memgraph.graph.tasks[node.task]
        tasks[task.engine, _name(task)].append(seconds)
        if task.engine == "host" and task.traffic:
            traffic, on_host = traffic + task.traffic, on_host + seconds
    return Observed(
        steps=len(steps),
        seconds=median(_whole(spans) for spans in steps),
        tasks={key: median(seconds) for key, seconds in tasks.items()},
        copies=copies,
        host_traffic=traffic,
        host_seconds=on_host,
    )


def _name(task: Task) -> str:
    return task.recomputes or task.name


def _whole(spans: Sequence[Span]) -> float:
    return max(span.end for span in spans) - min(span.start for span in spans)


def _took(memgraph: MemGraph, spans: Sequence[Span], shared: float) -> Iterator[tuple[int, float]]:
    """(node, seconds) of one step."""
    begin = min(span.start for span in spans)
    ends = {span.node: span.end for span in spans}
    free: dict[int, float] = {}
    copies = _Copies.of(memgraph, spans) if shared < 1 else None
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        node = memgraph.nodes[span.node]
        ready = max((ends[dep] for dep in node.deps if dep in ends), default=begin)
        # Clocks of two engines may differ by a little: a node never takes less than its own span.
        first = min(span.start, max(ready, free.get(span.lane, begin)))
        free[span.lane] = span.end
        seconds = span.end - first
        if copies is not None and node.kind != TASK:
            seconds -= (1 - shared) * copies.beside(other_way(node.engine), span)
        yield span.node, seconds


@dataclass(frozen=True, slots=True)
class _Copies:
    """When each direction copied: (starts, ends), in order."""

    of_engine: Mapping[str, tuple[list[float], list[float]]]

    @classmethod
    def of(cls, memgraph: MemGraph, spans: Sequence[Span]) -> "_Copies":
        found: dict[str, tuple[list[float], list[float]]] = {}
        for span in sorted(spans, key=lambda span: span.start):
            node = memgraph.nodes[span.node]
            if node.kind != TASK:
                starts, ends = found.setdefault(node.engine, ([], []))
                starts.append(span.start)
                ends.append(span.end)
        return cls(found)

    def beside(self, engine: str, span: Span) -> float:
        """Seconds of this span in which that direction copied too."""
        starts, ends = self.of_engine.get(engine, ([], []))
        seconds = 0.0
        for at in range(bisect_right(ends, span.start), bisect_left(starts, span.end)):
            seconds += min(span.end, ends[at]) - max(span.start, starts[at])
        return seconds
