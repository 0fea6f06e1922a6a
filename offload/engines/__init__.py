"""Where nodes run. An engine gets the work of a step and runs it in an order that keeps `deps`.

    serial    one node after the other on the caller's thread: the reference
    threads   compute on the caller's thread; copies, host tasks and further devices on their own
    cuda      on the streams of a device, ahead of time (streams.py)
    cudagraph the same, captured once and replayed by the device alone

When `run` returns, nothing touches the host's memory any more, and what the caller does on its own
stream comes after all that is still under way on a device.

All write down what ran when. An exception of a node ends the step: nothing new begins, what runs
comes to its end, and the exception leaves `run` as it is. The next `run` starts afresh.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from offload.memgraph import RELOAD, MemGraph, Node
from offload.taskgraph import Role

Run = Callable[[], object]
ORDERS = ("priority", "random")


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Work:
    """The nodes of a MemGraph, bound to addresses."""

    runs: Sequence[Run]
    engines: Sequence[str]
    waits: Sequence[int]
    """For how many others each of them waits."""
    successors: Sequence[Sequence[int]]
    """Who waits for it."""
    first: Sequence[int]
    """Those that wait for none."""
    lanes: Sequence[str]
    """The engines that have something to do."""
    baked: Callable[[], Hashable] = tuple
    """The numbers of today that a graph captured of the runs would keep."""
    name: Callable[[int], str] = str
    """Of a node, for people."""
    tell: Callable[[str], object] = str
    """Something that the user should know about the plan."""
    alone: bool = False
    """One engine computes, and besides it nothing moves but the inputs, at the begin."""
    uncaptured: str = ""
    """Why no graph can be captured of it, where that is known beforehand."""

    @classmethod
    def of(
        cls,
        memgraph: MemGraph,
        runs: Sequence[Run],
        baked: Callable[[], Hashable] = tuple,
        tell: Callable[[str], object] = str,
        uncaptured: str = "",
    ) -> "Work":
        successors: list[list[int]] = [[] for _ in memgraph.nodes]
        for number, node in enumerate(memgraph.nodes):
            for needed in node.deps:
                successors[needed].append(number)
        return cls(
            runs=tuple(runs),
            engines=tuple(node.engine for node in memgraph.nodes),
            waits=tuple(len(node.deps) for node in memgraph.nodes),
            successors=tuple(tuple(after) for after in successors),
            first=tuple(number for number, node in enumerate(memgraph.nodes) if not node.deps),
            lanes=tuple(dict.fromkeys(node.engine for node in memgraph.nodes)),
            baked=baked,
            name=memgraph.described,
            tell=tell,
            alone=all(
                node.engine == "compute" or _comes_in(memgraph, node) for node in memgraph.nodes
            ),
            uncaptured=uncaptured,
        )


def _comes_in(memgraph: MemGraph, node: Node) -> bool:
    """An input, before anything else."""
    first = node.kind == RELOAD and not node.deps and node.buffer is not None
    return first and memgraph.graph.buffers[node.buffer].role is Role.INPUT


@dataclass(slots=True, eq=False)
class Lane:
    """What one thread ran, in its order. A node that began and did not end has no `ends`."""

    name: str = ""
    """An engine, and which worker of it; of a thread that is every engine: nothing."""
    nodes: list[int] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Record:
    """One step."""

    lanes: list[Lane] = field(default_factory=list)
    failed: int | None = None
    """The node whose exception ended it, or that was interrupted."""
    under_way: Sequence[int] = ()
    """Where a device told of an error late: what it had to do then."""
    timed: bool = True
    """Its times are those of the nodes. If not, they are when the host enqueued each of them."""
    waited: float = 0.0
    """Seconds in which no kernel of the (first) compute engine could run: all that were left waited
    for copies, or for what other engines do. What it takes to choose the next one is not in it."""

    @property
    def finished(self) -> list[int]:
        return [node for lane in self.lanes for node in lane.nodes[: len(lane.ends)]]


class Engine(Protocol):
    """`close` ends its threads, if it has any; safe to call again."""

    def run(self, work: Work, record: Record) -> None: ...

    def close(self) -> None: ...
