"""What an engine is given: the work of a step, which it runs in an order that keeps `deps`.

    serial    one node after the other on the caller's thread: the reference
    threads   compute on the caller's thread; copies, host tasks and further devices on their own
    cuda      on the streams of devices, ahead of time (streams.py)
    cudagraph the same, captured once and replayed by the device alone

When `run` returns, nothing touches the host's memory any more. What the caller does on its own
stream then comes after everything that still runs on a device.

All engines note what ran when. An exception of a node ends the step: nothing new begins, what runs
ends, and `run` raises the exception unchanged. The next `run` starts afresh.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from offload.graph.memgraph import RELOAD, TASK, MemGraph, Node
from offload.graph.taskgraph import Role, Task

Run = Callable[[], object]
ORDERS = ("priority", "random")


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class StepWork:
    """The nodes of a MemGraph, bound to addresses."""

    runs: Sequence[Run]
    lane_of: Sequence[str]
    """By node."""
    waits: Sequence[int]
    """For how many other nodes each node waits."""
    successors: Sequence[Sequence[int]]
    """The nodes that wait for each node."""
    first: Sequence[int]
    """The nodes that wait for no other."""
    lanes: Sequence[str]
    """The lanes that have something to do."""
    name: Callable[[int], str] = str
    """A readable name of a node."""
    report: Callable[[str], object] = str
    """Tells the user something about the plan."""
    seconds: Sequence[float] = ()
    """By node: what it is predicted to take. Empty: nobody knows."""
    in_a_row: bool = False
    """Whether one lane computes everything, and only the inputs move, at the beginning."""
    uncaptured: str = ""
    """Why no graph can be captured of this work, if that is known beforehand."""
    varying: frozenset[int] = frozenset()
    """The nodes whose numbers differ from run to run, so that no graph can keep them."""

    @classmethod
    def from_memgraph(
        cls,
        memgraph: MemGraph,
        runs: Sequence[Run],
        report: Callable[[str], object] = str,
        uncaptured: str = "",
        seconds: Sequence[float] = (),
    ) -> "StepWork":
        successors: list[list[int]] = [[] for _ in memgraph.nodes]
        for number, node in enumerate(memgraph.nodes):
            for needed in node.deps:
                successors[needed].append(number)
        return cls(
            runs=tuple(runs),
            lane_of=tuple(node.lane for node in memgraph.nodes),
            waits=tuple(len(node.deps) for node in memgraph.nodes),
            successors=tuple(tuple(after) for after in successors),
            first=tuple(number for number, node in enumerate(memgraph.nodes) if not node.deps),
            lanes=tuple(dict.fromkeys(node.lane for node in memgraph.nodes)),
            name=memgraph.describe,
            report=report,
            in_a_row=all(
                node.lane == "compute" or _comes_in(memgraph, node) for node in memgraph.nodes
            ),
            uncaptured=uncaptured,
            seconds=seconds,
            varying=frozenset(
                number
                for number, node in enumerate(memgraph.nodes)
                if node.kind == TASK and _varies(memgraph.graph.tasks[node.task])
            ),
        )

    def dependencies(self) -> list[list[int]]:
        """For every node, the nodes that it waits for."""
        needed: list[list[int]] = [[] for _ in self.runs]
        for node, after in enumerate(self.successors):
            for later in after:
                needed[later].append(node)
        return needed

    def part(self, nodes: Sequence[int]) -> "StepWork":
        """The work of these nodes alone, numbered from zero. What they wait for elsewhere is done
        already."""
        place = {node: number for number, node in enumerate(nodes)}
        successors = [
            tuple(place[later] for later in self.successors[node] if later in place)
            for node in nodes
        ]
        waits = [0] * len(nodes)
        for later in (node for after in successors for node in after):
            waits[later] += 1
        lane_of = tuple(self.lane_of[node] for node in nodes)
        return replace(
            self,
            runs=tuple(self.runs[node] for node in nodes),
            lane_of=lane_of,
            waits=tuple(waits),
            successors=tuple(successors),
            first=tuple(number for number, count in enumerate(waits) if not count),
            lanes=tuple(dict.fromkeys(lane_of)),
            seconds=tuple(self.seconds[node] for node in nodes) if self.seconds else (),
            name=lambda number: self.name(nodes[number]),
            varying=frozenset(place[node] for node in self.varying if node in place),
        )


def _varies(task: Task) -> bool:
    """Whether a kernel of a live step has numbers that differ from run to run (tape_kernel.py)."""
    return any(getattr(call.op, "varying", ()) for call in getattr(task.kernel, "calls", ()))


def _comes_in(memgraph: MemGraph, node: Node) -> bool:
    """Whether the node brings in an input before anything else runs."""
    first = node.kind == RELOAD and not node.deps and node.buffer is not None
    return first and memgraph.graph.buffers[node.buffer].role is Role.INPUT


@dataclass(slots=True, eq=False)
class LaneRecord:
    """What one thread ran, in order. A node that began and has not ended has no entry in `ends`."""

    name: str = ""
    """The lane and which of its workers; empty for a thread that is every lane."""
    nodes: list[int] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Record:
    """What ran when in one step."""

    lanes: list[LaneRecord] = field(default_factory=list)
    failed: int | None = None
    """The node that raised the exception, or was interrupted."""
    under_way: Sequence[int] = ()
    """If a device reported an error late: the nodes that it may have been running."""
    timed: bool = True
    """Whether the times are those of the nodes. If not, they are when the host enqueued them."""
    waited: float = 0.0
    """Seconds in which no kernel of the (first) compute lane could run, because all that were
    left waited for copies or other lanes. The time to choose the next kernel does not count."""

    @property
    def finished(self) -> list[int]:
        return [node for ran in self.lanes for node in ran.nodes[: len(ran.ends)]]

    def add(self, part: "Record", nodes: Sequence[int]) -> None:
        """Add the record of a part of the step. `nodes`: the part's numbers in the step."""
        for ran in part.lanes:
            numbers = [nodes[node] for node in ran.nodes]
            self.lanes.append(LaneRecord(ran.name, numbers, ran.starts, ran.ends))
        self.failed = None if part.failed is None else nodes[part.failed]
        self.under_way = [nodes[node] for node in part.under_way]
        self.timed = self.timed and part.timed
        self.waited += part.waited


class Engine(Protocol):
    """Runs nodes. `close` ends its threads, if it has any; it may be called again."""

    @property
    def measure(self) -> bool:
        """Whether the next steps are timed node by node, where that costs time."""
        ...

    @measure.setter
    def measure(self, on: bool) -> None: ...

    @property
    def captures(self) -> bool:
        """Whether it replays a graph of the nodes, so that changing numbers must lie in memory."""
        ...

    def run(self, work: StepWork, record: Record) -> None: ...

    def pause(self) -> None:
        """Wait until no node runs, and begin none before `resume`. Another thread calls it while
        the one in `run` stands aside (gate.py)."""
        ...

    def resume(self) -> None: ...

    def close(self) -> None: ...


def run_part(engine: Engine, work: StepWork, record: Record, nodes: Sequence[int]) -> None:
    """Run a part of a step. `nodes`: the part's numbers in the step, which `record` has."""
    part = Record()
    try:
        engine.run(work, part)
    finally:
        record.add(part, nodes)
