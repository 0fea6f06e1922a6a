"""Steps of several plans on one device, simulated together, node by node.

    turns         A body, A tail | swap | B body, B tail | swap | A ...
    host tails    A body | swap | B body         | swap | A body
                         | A tail ....           | B tail ....
    windows       A's updates in T bytes of the arena, beside B's passes in the others

All plans are on the same lanes: one compute lane, one link, one host. A swap parks the residents of
one job (d2h) and then brings those of the next one in (h2d); nothing of a step overlaps with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from offload import Costs, MemGraph, Plan, TaskGraph, simulate
from offload.graph.memgraph import OFFLOAD, RELOAD, TASK, Node, places_of
from offload.graph.taskgraph import HOST, Task
from offload.planning.host_tails import host_tail

BARRIER = "barrier"


@dataclass(frozen=True, slots=True)
class Turn:
    """A plan whose steps take turns with others."""

    memgraph: MemGraph
    resident: int
    """Bytes that are parked when another job comes."""
    tail: frozenset[int]

    @classmethod
    def of(cls, memgraph: MemGraph) -> "Turn":
        return cls(memgraph, resident_of(memgraph), frozenset(host_tail(memgraph)))


def resident_of(memgraph: MemGraph, prefix: str = "") -> int:
    """Bytes of the residents whose names begin so."""
    homes = places_of(memgraph).items()
    return sum(p.nbytes for key, p in homes if p.arena != HOST and key.startswith(prefix))


@dataclass(slots=True)
class Joint:
    """Nodes of several steps, as one MemGraph for the simulator. Each has its seconds already."""

    costs: Costs
    nodes: list[Node] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)

    def step(self, memgraph: MemGraph, after: Sequence[int]) -> range:
        """Add a step that begins after these nodes. Returns the numbers of its nodes."""
        first = len(self.nodes)
        for node in memgraph.nodes:
            deps = tuple(first + dep for dep in node.deps) or tuple(after)
            if node.kind == TASK:
                seconds = self.costs.of_task(memgraph.graph.tasks[node.task])
                self._task(node.lane, seconds, deps)
            else:
                self.nodes.append(replace(node, accesses=(), deps=deps, task=0))
        return range(first, len(self.nodes))

    def copy(self, kind: str, nbytes: int, after: Sequence[int]) -> Sequence[int]:
        """Add a copy of so many bytes. Returns what to wait for."""
        if not nbytes:
            return after
        lane = "d2h" if kind == OFFLOAD else "h2d"
        self.nodes.append(Node(kind, lane, (), tuple(after), task=0, nbytes=nbytes))
        return (len(self.nodes) - 1,)

    def barrier(self, after: Sequence[int]) -> Sequence[int]:
        """One node that comes after all of these."""
        self._task(BARRIER, 0.0, tuple(after))
        return (len(self.nodes) - 1,)

    def _task(self, lane: str, seconds: float, deps: tuple[int, ...]) -> None:
        self.nodes.append(Node(TASK, lane, (), deps, task=len(self.tasks)))
        self.tasks.append(Task("", (), (), seconds=seconds))

    @property
    def seconds(self) -> float:
        graph = TaskGraph((), tuple(self.tasks))
        memgraph = MemGraph(graph, tuple(self.nodes), {}, {}, {}, (), {})
        return simulate(memgraph, self.costs).makespan


def in_turns(turns: Sequence[Turn], rounds: int, costs: Costs, tails: bool) -> float:
    """Seconds of `rounds` steps of each, one after the other. `tails`: the device is handed on
    while the host works on a step's tail."""
    joint = Joint(costs)
    free: Sequence[int] = joint.barrier(())
    over: list[Sequence[int]] = [free for _ in turns]
    parked = 0
    for _ in range(rounds):
        for number, turn in enumerate(turns):
            there = joint.copy(OFFLOAD, parked, free)
            there = joint.copy(RELOAD, turn.resident, there)
            nodes = joint.step(turn.memgraph, joint.barrier((*there, *over[number])))
            body = [n for at, n in enumerate(nodes) if not (tails and at in turn.tail)]
            free = joint.barrier(body)
            over[number] = joint.barrier(nodes)
            parked = turn.resident
    return joint.seconds


@dataclass(frozen=True, slots=True)
class Windowed:
    """A clipped step in two plans: passes in M - T, updates in T."""

    passes: Plan
    updates: Plan


def in_windows(jobs: Sequence[Windowed], rounds: int, costs: Costs, updates_first: bool) -> float:
    """Seconds of `rounds` steps of each, where the updates of one run beside the passes of the
    next one. `updates_first`: who is first on a lane that both want."""
    joint = Joint(costs)
    start = joint.barrier(())
    passes_free, window_free = start, start
    over: list[Sequence[int]] = [start for _ in jobs]
    waiting: tuple[int, Sequence[int]] | None = None
    """The job whose updates come next, and what they wait for."""
    for at in range(rounds * len(jobs) + 1):
        number, ready = at % len(jobs), None
        for updates in (updates_first, not updates_first):
            if updates and waiting is not None:
                job, passed = waiting
                window_free = _update(joint, jobs[job], (*window_free, *passed))
                over[job] = window_free
            elif not updates and at < rounds * len(jobs):
                ready = passes_free = _pass(joint, jobs[number], (*passes_free, *over[number]))
        waiting = None if ready is None else (number, ready)
    return joint.seconds


def _update(joint: Joint, job: Windowed, after: Sequence[int]) -> Sequence[int]:
    """Updates, with what stays in the window for all of them brought in and out."""
    memgraph = job.updates.memgraph
    held = resident_of(memgraph)
    nodes = joint.step(memgraph, joint.barrier(joint.copy(RELOAD, held, after)))
    return joint.copy(OFFLOAD, held, joint.barrier(nodes))


def _pass(joint: Joint, job: Windowed, after: Sequence[int]) -> Sequence[int]:
    """Passes. Weights that stay come in; gradients that stay go out. Weights are not changed."""
    memgraph = job.passes.memgraph
    begin = joint.copy(RELOAD, resident_of(memgraph, "w"), after)
    nodes = joint.step(memgraph, joint.barrier(begin))
    return joint.copy(OFFLOAD, resident_of(memgraph, "g"), joint.barrier(nodes))
