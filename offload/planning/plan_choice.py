"""What a search chose, in a few numbers, so that its plan can be made again without a search. Pure.

    search:  20 walks, the best stays     -> PlanChoice: which graph, which policy
    again:   the same graph and numbers   -> one walk with that policy gives the same plan

A choice is no plan: whoever has one walks the planner, simulates and proves as after a search. So a
choice that is wrong gives a slower plan or an error, and never a plan that is not proved.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from offload.graph.taskgraph import Buffer, Task, TaskGraph
from offload.planning.policies import Policy

UNREAD = ("kernel", "where")
"""What no planner reads of a task."""
NUMBERS = ("ahead", "evict_ahead", "drop_ahead", "host_workers")


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """What the best plan was made of. Numbers count the graphs of `Wanted` in their order."""

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
            raise ValueError("a number or a text of the choice is none")
        policy = Policy(frozenset(resident), **{name: data[name] for name in NUMBERS})
        return cls(data["graph"], data["recomputed"], policy, tuple(tried))


def graph_digest(graph: TaskGraph) -> str:
    """A digest of all that a planner reads of a graph. Other kernels in it have the same one."""
    buffers, tasks = _of(Buffer), _of(Task)
    said = hashlib.blake2b(digest_size=16)
    for buffer in graph.buffers:
        said.update(repr(buffers(buffer)).encode())
    said.update(b"tasks")
    for task in graph.tasks:
        said.update(repr(tasks(task)).encode())
    said.update(repr((graph.outputs, graph.kept, graph.alignment)).encode())
    return said.hexdigest()


def _of(kind: type[Buffer] | type[Task]) -> "attrgetter[tuple[Any, ...]]":
    return attrgetter(*(field.name for field in fields(kind) if field.name not in UNREAD))
