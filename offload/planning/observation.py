"""Turns the first steps of a plan into seconds by node and the costs that follow. Pure.

    compute  |F1 |..F2   |     F2 could begin when F1 ended, so the wait in between is F2's
    h2d      | w2 |w3  |       a1 slowed w3 down, so its seconds without a1 are estimated
    d2h            |a1 |

A node's seconds run from when it could begin (all its dependencies ended and its worker was free)
to its end. So a simulation with these seconds repeats the measured step, and predicts another plan
of the same tasks. The median over the steps counts for each node.

Tasks are known by name and lane: another plan has other nodes but the same tasks.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Protocol

from offload.graph.costs import Costs
from offload.graph.memgraph import OFFLOAD, RELOAD, TASK, MemGraph
from offload.graph.rates import Sample, link
from offload.graph.taskgraph import Task, TaskGraph
from offload.planning.simulator import other_way


class TimedNode(Protocol):
    """The times of one node; trace.py has the real one."""

    @property
    def worker(self) -> int:
        """Nodes of one worker ran one after the other."""
        ...

    @property
    def node(self) -> int: ...

    @property
    def start(self) -> float: ...

    @property
    def end(self) -> float: ...


@dataclass(frozen=True, slots=True, eq=False)
class StepObservation:
    """What the steps of one plan took."""

    steps: int
    seconds: float
    """Median seconds of a step, from its first start to its last end."""
    tasks: Mapping[tuple[str, str], float]
    """Seconds of tasks, by lane and name."""
    copies: Mapping[str, Sequence[tuple[int, float]]]
    """By kind of copy: the bytes and the undisturbed seconds of each copy."""
    host_traffic: int
    """Bytes that tasks on the host read and write."""
    host_seconds: float

    def on(self, graph: TaskGraph) -> TaskGraph:
        """The graph with these seconds for each task that was seen. A task that is run once more
        takes as long as the original."""
        return graph.with_tasks(
            [
                replace(task, seconds=self.tasks.get((task.lane, _name(task)), task.seconds))
                for task in graph.tasks
            ]
        )

    def costs(self, costs: Costs) -> Costs:
        """The costs with the observed rates of copies and host; rates that were not seen stay."""
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
    """Seconds of a copy without bytes, from the line through the smaller and the larger half.

    If all copies have one size, the believed value is kept as far as it leaves room for them."""
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
    """The rate at which all copies together take the seconds that they took."""
    seconds = sum(s for _, s in copies)
    return sum(b for b, _ in copies) / max(seconds - len(copies) * fixed, seconds / 100)


def observe(
    memgraph: MemGraph, steps: Sequence[Sequence[TimedNode]], shared: float = 1.0
) -> StepObservation:
    """The median observation. `steps`: the timed nodes of whole steps. `shared`: see `Costs`."""
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
        tasks[task.lane, _name(task)].append(seconds)
        if task.lane == "host" and task.traffic:
            traffic, on_host = traffic + task.traffic, on_host + seconds
    return StepObservation(
        steps=len(steps),
        seconds=median(_whole(spans) for spans in steps),
        tasks={key: median(seconds) for key, seconds in tasks.items()},
        copies=copies,
        host_traffic=traffic,
        host_seconds=on_host,
    )


def _name(task: Task) -> str:
    return task.recomputes or task.name


def _whole(spans: Sequence[TimedNode]) -> float:
    return max(span.end for span in spans) - min(span.start for span in spans)


def _took(
    memgraph: MemGraph, spans: Sequence[TimedNode], shared: float
) -> Iterator[tuple[int, float]]:
    """The (node, seconds) of one step."""
    begin = min(span.start for span in spans)
    ends = {span.node: span.end for span in spans}
    free: dict[int, float] = {}
    copies = _Copies.of(memgraph, spans) if shared < 1 else None
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        node = memgraph.nodes[span.node]
        ready = max((ends[dep] for dep in node.deps if dep in ends), default=begin)
        # Clocks of two lanes may differ a little, but a node takes at least its own span.
        first = min(span.start, max(ready, free.get(span.worker, begin)))
        free[span.worker] = span.end
        seconds = span.end - first
        if copies is not None and node.kind != TASK:
            seconds -= (1 - shared) * copies.beside(other_way(node.lane), span)
        yield span.node, seconds


@dataclass(frozen=True, slots=True)
class _Copies:
    """When each direction copied: (starts, ends), ascending."""

    of_lane: Mapping[str, tuple[list[float], list[float]]]

    @classmethod
    def of(cls, memgraph: MemGraph, spans: Sequence[TimedNode]) -> "_Copies":
        found: dict[str, tuple[list[float], list[float]]] = {}
        for span in sorted(spans, key=lambda span: span.start):
            node = memgraph.nodes[span.node]
            if node.kind != TASK:
                starts, ends = found.setdefault(node.lane, ([], []))
                starts.append(span.start)
                ends.append(span.end)
        return cls(found)

    def beside(self, lane: str, span: TimedNode) -> float:
        """Seconds of this span during which the other lane copied, too."""
        starts, ends = self.of_lane.get(lane, ([], []))
        seconds = 0.0
        for at in range(bisect_right(ends, span.start), bisect_left(starts, span.end)):
            seconds += min(span.end, ends[at]) - max(span.start, starts[at])
        return seconds
