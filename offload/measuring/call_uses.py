"""What a graph does with the results of a call: it decides what a kernel may return for them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from offload.graph.taskgraph import TaskGraph
from offload.measuring.distinct_calls import values_of
from offload.program.kernels import Value


@dataclass(slots=True)
class Use:
    """The uses of a call in a graph."""

    line: str
    """The user's line at the first of them, and a colon; or nothing."""
    reads: frozenset[int]
    """The buffers that the first of them is given."""
    makes: list[Sequence[Value | None]] = field(default_factory=list)
    """The results of each of them, by position."""
    needed: set[int] = field(default_factory=set)
    """Positions of the results that somebody reads."""
    rewritten: bool = False
    """Whether an argument or a result is changed in place anywhere in the graph."""


def uses_of(graph: TaskGraph, keys: Sequence[Sequence[Any]]) -> dict[Any, Use]:
    """The uses of all calls. `keys`: of each task the keys of its calls."""
    tasks = [(task, found) for task, found in zip(graph.tasks, keys, strict=True) if found]
    read, rewritten = set(graph.outputs), set[int]()
    for task, _ in tasks:
        for call in task.kernel.calls:
            read.update(value.buffer for value in values_of((call.args, dict(call.kwargs))))
        made = {v.buffer for call in task.kernel.calls for v in filter(None, call.outputs)}
        rewritten.update({*task.writes} - made)
    uses: dict[Any, Use] = {}
    for task, found in tasks:
        for key, call in zip(found, task.kernel.calls, strict=True):
            given = frozenset(v.buffer for v in values_of((call.args, dict(call.kwargs))))
            use = uses.setdefault(key, Use(f"{task.where}: " if task.where else "", given))
            use.makes.append(call.outputs)
            use.needed |= {n for n, v in enumerate(call.outputs) if v and v.buffer in read}
            use.rewritten |= not rewritten.isdisjoint(task.touches)
    return uses
