"""Merges small updates into a few tasks, called buckets.

    b9 u9 b8 u8 b7 u7 b6 ...      ->      b9 b8 b7 u9+2 b6 ...

A bucket runs at the place of its last update, so the gradients of the others wait until then. It
closes before
    - its bytes exceed `nbytes` or those of the largest task (it would set the smallest budget),
    - the waiting gradients lift the live bytes above the peak of the graph,
    - a task comes that must run after one of its updates.

Very small updates (biases, norms) have buckets of their own, which stay open while weights pass.
Their gradients cost little memory, and a small kernel between two large ones takes twice as long as
one right after another small kernel.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from offload.graph.taskgraph import Role, Task, TaskGraph
from offload.lowering.merging import find_ordered_tasks, merge_groups, merge_key
from offload.lowering.update_splits import most_bytes

SMALL = 16
"""A small update touches at most 1 / SMALL of a bucket's bytes."""


@dataclass(slots=True)
class _Bucket:
    """Updates that will become one task."""

    members: list[int] = field(default_factory=list)
    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)
    waiting: int = 0
    """Bytes that would be free by now if the members had run at their own places."""
    workspace: int = 0

    def must_precede(self, task: Task) -> bool:
        """Whether the task must run after a member. (Tasks named in an `after` are never
        members.)"""
        return not (self.writes.isdisjoint(task.touches) and self.reads.isdisjoint(task.writes))


def bucket_updates(graph: TaskGraph, nbytes: int | None = None) -> TaskGraph:
    """Merge neighbouring updates that together touch at most `nbytes`."""
    nbytes = nbytes or most_bytes(graph)
    ordered = find_ordered_tasks(graph)
    limit = min(nbytes, max((_room(graph, task) for task in graph.tasks), default=0))
    live = graph.live_bytes()
    peak = max(live, default=0)
    _, last = graph.spans()
    open_: dict[tuple[object, ...], _Bucket] = {}
    groups: list[list[int]] = []

    def close(keys: Iterable[tuple[object, ...]]) -> None:
        groups.extend(open_.pop(key).members for key in keys)

    for number, task in enumerate(graph.tasks):
        kind = None
        if task.phase == "update" and number not in ordered:
            kind = (*_kind(task), _trains(graph, task) and _room(graph, task) <= limit // SMALL)
        close([key for key, b in open_.items() if _must_close(b, key == kind, graph, task)])
        waiting = sum(bucket.waiting for bucket in open_.values())
        workspace = max((bucket.workspace for bucket in open_.values()), default=0)
        if live[number] + waiting + workspace > peak:
            close([*open_])
        if kind is None:
            groups.append([number])
        else:
            bucket = open_.setdefault(kind, _Bucket())
            touched = bucket.reads.union(bucket.writes, task.touches)
            if bucket.members and _bytes(graph, touched) > limit:
                close([kind])
                bucket = open_.setdefault(kind, _Bucket())
            bucket.members.append(number)
            bucket.reads.update(task.reads)
            bucket.writes.update(task.writes)
            bucket.workspace = max(bucket.workspace, task.workspace)
        done = [b for b in task.touches if last[b] == number]
        for bucket in open_.values():
            own_done = [b for b in done if b in bucket.reads or b in bucket.writes]
            bucket.waiting += _bytes(graph, own_done)
    close([*open_])
    groups.sort(key=lambda members: members[-1])
    together = sum(len(members) for members in groups if len(members) > 1)
    buckets = sum(len(members) > 1 for members in groups)
    note = f"{together} updates are merged into {buckets} buckets" if buckets else ""
    return merge_groups(graph, groups, note)


def _must_close(bucket: _Bucket, is_same_kind: bool, graph: TaskGraph, task: Task) -> bool:
    """Whether the task can neither join the bucket nor run before it. A bucket's calls may become
    one call, so no parameter is in it twice."""
    if not is_same_kind:
        return bucket.must_precede(task)
    return any(b in bucket.writes and graph.buffers[b].role is Role.PARAMETER for b in task.writes)


def _kind(task: Task) -> tuple[object, ...]:
    """A key that keeps measuring gradients apart from changing them: the latter may go to the
    host."""
    return (*merge_key(task), {*task.writes} <= {*task.reads})


def _trains(graph: TaskGraph, task: Task) -> bool:
    """Whether it is an update or clips a gradient; norms and sums of gradients do not count."""
    clips = {*task.writes} <= {*task.reads} and not any(
        graph.buffers[b].persistent for b in task.touches
    )
    return clips or any(graph.buffers[b].role is Role.PARAMETER for b in task.writes)


def _room(graph: TaskGraph, task: Task) -> int:
    return _bytes(graph, task.touches) + task.workspace


def _bytes(graph: TaskGraph, buffers: Iterable[int]) -> int:
    return sum(graph.buffers[b].nbytes for b in buffers)
