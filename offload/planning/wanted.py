"""What a plan must fit, what was found, and one walk of the planner between the two. Pure."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from operator import attrgetter
from typing import Any

from offload.graph.costs import Costs
from offload.graph.memgraph import SMALL_WORKSPACE, MemGraph, Place
from offload.graph.taskgraph import Buffer, Task, TaskGraph
from offload.planning.planner import build_memgraph
from offload.planning.policies import Policy
from offload.planning.refusal import scratch_bytes
from offload.planning.simulator import Simulation

UNREAD = ("kernel", "where")
"""What no planner reads of a task."""
NUMBERS = ("ahead", "evict_ahead", "drop_ahead", "host_workers")


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """What the best plan was made of, so that it can be made again without a search. Numbers count
    the graphs of `Wanted` in their order.

    A choice is no plan: the planner walks, simulates and proves as after a search. A wrong choice
    gives a slower plan or an error, and never a plan that is not proved."""

    graph: int
    recomputed: str
    """The name of its variant that computes activations again; empty: none."""
    policy: Policy
    tried: tuple[str, ...]

    def as_data(self) -> dict[str, Any]:
        """The choice as plain data for a file."""
        return {
            "graph": self.graph,
            "recomputed": self.recomputed,
            "resident": sorted(self.policy.resident),
            **{name: getattr(self.policy, name) for name in NUMBERS},
            "tried": list(self.tried),
        }

    @classmethod
    def of_data(cls, data: Any) -> "PlanChoice":
        """Read what `as_data` made. Raises `ValueError` if this is something else."""
        names = {"graph", "recomputed", "resident", *NUMBERS, "tried"}
        if not isinstance(data, Mapping) or set(data) != names:
            raise ValueError(f"a choice has {', '.join(sorted(names))}")
        resident, tried = data["resident"], data["tried"]
        whole = [data["graph"], *(data[name] for name in NUMBERS)]
        if not (
            isinstance(resident, list)
            and all(type(number) is int and number >= 0 for number in [*resident, *whole])
            and isinstance(tried, list)
            and all(isinstance(text, str) for text in [*tried, data["recomputed"]])
        ):
            raise ValueError("a field of the choice has a wrong type")
        policy = Policy(frozenset(resident), **{name: data[name] for name in NUMBERS})
        return cls(data["graph"], data["recomputed"], policy, tuple(tried))


@dataclass(frozen=True, slots=True, eq=False)
class FoundPlan:
    """A plan that was tried."""

    memgraph: MemGraph
    policy: Policy
    simulation: Simulation
    tried: tuple[str, ...] = ()
    """A line for each plan that was tried."""
    nothing_moves: bool = False
    """Whether nothing moves, so that there was no other plan to choose."""
    choice: PlanChoice | None = None
    """What was chosen, if there was something to choose."""
    known: bool = False
    """Whether it was made from a choice that was known before, without a search."""


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """What the plan must fit, and which graphs may be planned."""

    graph: TaskGraph
    capacities: Mapping[int, int]
    """Bytes of each device's arena, and of the host's if it has a limit."""
    costs: Costs
    homes: Mapping[int, Place]
    """Where persistent buffers lie already."""
    reserve: int = 0
    """Bytes of the budget outside of all arenas; a refusal names them."""
    recompute: bool = True
    others: Sequence[tuple[str, TaskGraph]] = ()
    """Other graphs of the same step that may be planned instead, with names for the user."""
    tails: bool = False
    """Whether no host address is given out twice, so that host tails are long."""

    @property
    def graphs(self) -> tuple[TaskGraph, ...]:
        """All graphs that may be planned. A choice has the number of one of them."""
        return (self.graph, *(graph for _, graph in self.others))

    def digest(self) -> str:
        """A digest of all that decides which plan is the best."""
        names = [name for name, _ in self.others]
        homes = sorted((b, astuple(place)) for b, place in self.homes.items())
        parts = (
            [graph_digest(graph) for graph in self.graphs], names,
            sorted(self.capacities.items()), astuple(self.costs), homes, self.reserve,
            self.recompute, self.tails,
        )  # fmt: skip
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def graph_digest(graph: TaskGraph) -> str:
    """A digest of all that a planner reads of a graph. Other kernels in it have the same one."""
    buffers, tasks = _fields_of(Buffer), _fields_of(Task)
    digest = hashlib.blake2b(digest_size=16)
    for buffer in graph.buffers:
        digest.update(repr(buffers(buffer)).encode())
    digest.update(b"tasks")
    for task in graph.tasks:
        digest.update(repr(tasks(task)).encode())
    rest = graph.outputs, graph.kept, graph.alignment, graph.devices, sorted(graph.homes.items())
    digest.update(repr(rest).encode())
    return digest.hexdigest()


def _fields_of(kind: type[Buffer] | type[Task]) -> "attrgetter[tuple[Any, ...]]":
    return attrgetter(*(field.name for field in fields(kind) if field.name not in UNREAD))


def peak_bytes(graph: TaskGraph, device: int) -> int:
    """The bytes that a device needs if nothing ever leaves it."""
    change = [0] * (len(graph.tasks) + 1)
    first, last = graph.spans(device)
    for b, begin in first.items():
        change[begin] += graph.align(graph.buffers[b].nbytes)
        change[last[b] + 1] -= graph.align(graph.buffers[b].nbytes)
    peak = live = 0
    for number, task in enumerate(graph.tasks):
        live += change[number]
        hidden = task.device == device and task.workspace > SMALL_WORKSPACE
        peak = max(peak, live + (graph.align(task.workspace) if hidden else 0))
    return peak + scratch_bytes(graph, device)


def walk_graph(
    wanted: Wanted,
    arenas: Mapping[int, int],
    policy: Policy,
    graph: TaskGraph | None = None,
) -> MemGraph:
    graph = graph or wanted.graph
    clock, now = [], 0.0
    for task in graph.tasks:
        clock.append(now)
        now += wanted.costs.of_task(task)
    capacities = {**wanted.capacities, **arenas}
    return build_memgraph(graph, capacities, policy, clock, wanted.homes)
