"""Where to look when a planned step and plain Lightning's step differ (pure).

head.bias differs   -->  it is first used by addmm (model.py:12); the step reads beta = 0.5
"""

from collections.abc import Iterator

from offload import TaskGraph
from offload.watching.watched_state import WatchedState, brief

MOST = 8
"""So many Python values are named."""


def suspects(differs: str, graph: TaskGraph, watched: WatchedState) -> str:
    """Name the first task that uses the tensor `differs`, and the numbers that Python code gave to
    the step."""
    return " ".join(filter(None, (_first_use(differs, graph), _numbers(watched))))


def _first_use(differs: str, graph: TaskGraph) -> str:
    for task in graph.tasks:
        for buffer in (*task.reads, *task.writes):
            tensor = graph.buffers[buffer].tensor
            if graph.buffers[buffer].persistent and tensor and _names(differs, tensor):
                where = f" ({task.where})" if task.where else ""
                return f"{tensor} is first used by {task.name}{where}."
    return ""


def _names(differs: str, tensor: str) -> bool:
    return differs == tensor or differs.endswith((f" {tensor}", f".{tensor}"))


def _numbers(watched: WatchedState) -> str:
    said = list(dict.fromkeys(_values(watched)))
    more = f" and {len(said) - MOST} more" if len(said) > MOST else ""
    return f"Numbers that the step read in Python: {', '.join(said[:MOST])}{more}." if said else ""


def _values(watched: WatchedState) -> Iterator[str]:
    for each in (*watched.dicts, *watched.lists, *(one for _, one in watched.others)):
        for key, value in zip(each.keys, each.values, strict=True):
            if isinstance(value, float):
                yield f"{each.label(key)} = {brief(value)}"
