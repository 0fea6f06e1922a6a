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
    tasks = [
        (task, found, [frozenset(v.buffer for v in values_of(call)) for call in task.kernel.calls])
        for task, found in zip(graph.tasks, keys, strict=True)
        if found
    ]
    read, rewritten = set(graph.outputs), set[int]()
    for task, _, given in tasks:
        read.update(*given)
        made = {v.buffer for call in task.kernel.calls for v in filter(None, call.outputs)}
        rewritten.update({*task.writes} - made)
    uses: dict[Any, Use] = {}
    for task, found, given in tasks:
        is_rewritten = not rewritten.isdisjoint(task.touches)
        for key, call, reads in zip(found, task.kernel.calls, given, strict=True):
            if (use := uses.get(key)) is None:
                use = uses[key] = Use(f"{task.where}: " if task.where else "", reads)
            use.makes.append(call.outputs)
            use.needed |= {n for n, v in enumerate(call.outputs) if v and v.buffer in read}
            use.rewritten |= is_rewritten
    return uses
