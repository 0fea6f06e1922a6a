"""Makes one task of several in a row, where a step has very many. Pure.

    mm add gelu mm | mm add gelu mm        ->        mm+3 | mm+3
       t1  t2   t3                                   workspace: [t1][t2], then t3 where t1 was

A buffer that only one chunk touches lies in its workspace, by a layout of its own: a planner has
one place where it had many. A chunk belongs to one phase and one micro-batch, and ends where the
fewest bytes go on to the next one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from offload.graph.memgraph import SMALL_WORKSPACE
from offload.graph.packing import pack_blocks
from offload.graph.taskgraph import UPDATE, Role, Task, TaskGraph
from offload.lowering.merging import merge_groups, merge_key
from offload.planning.refusal import scratch_bytes
from offload.program.kernels import Calls

MOST = 8_000
"""So many tasks are planned one by one. Of more, chunks are made."""


def chunk_tasks(graph: TaskGraph, room: int, most: int = MOST) -> TaskGraph:
    """Make chunks of about equally many tasks, so that about `most` tasks are left. A chunk needs
    at most `room` bytes, or as many as the largest task."""
    if len(graph.tasks) <= most:
        return graph
    chunker = _Chunker(graph, room, -(-len(graph.tasks) // most))
    groups = [group for run in _runs(graph) for group in chunker.cut(run)]
    chunks = sum(len(group) > 1 for group in groups)
    note = f"{len(graph.tasks)} tasks form {len(groups)}, {chunks} of them chunks"
    joined = merge_groups(graph, groups, note)
    return joined.with_tasks(
        [
            task if len(group) == 1 else chunker.with_workspace(task, group)
            for task, group in zip(joined.tasks, groups, strict=True)
        ]
    )


def _runs(graph: TaskGraph) -> Iterator[range]:
    """Tasks in a row that may be in one chunk; others alone."""
    begin, key = 0, None
    for number, task in enumerate(graph.tasks):
        task_key = merge_key(task) if _may_join(task) else number
        if task_key != key and number:
            yield range(begin, number)
            begin = number
        key = task_key
    yield range(begin, len(graph.tasks))


def _may_join(task: Task) -> bool:
    kernel = task.kernel
    is_plain = kernel is None or (hasattr(kernel, "calls") and not getattr(kernel, "inner", {}))
    return task.lane == "compute" and task.phase != UPDATE and is_plain


@dataclass(frozen=True, slots=True)
class _Workspace:
    """The workspace of a chunk."""

    nbytes: int
    inner: dict[int, range]
    apart: tuple[int, ...]
    """By member: where what its kernels allocate begins."""


class _Chunker:
    """Cuts runs into chunks of so many tasks."""

    def __init__(self, graph: TaskGraph, room: int, size: int) -> None:
        self._graph, self._size = graph, size
        self._first, self._last = graph.spans()
        self._scratch = max(scratch_bytes(graph, device) for device in graph.devices)
        """A larger workspace gets a place of its own, so that what small ones share does not
        grow."""
        fixed = {*graph.outputs, *graph.kept}
        self._stays = [
            number in fixed or buffer.persistent or buffer.role is Role.INPUT
            for number, buffer in enumerate(graph.buffers)
        ]
        largest = (self._room([n]) for n, task in enumerate(graph.tasks) if _may_join(task))
        self._most = max(room, max(largest, default=0))

    def cut(self, run: range) -> Iterator[range]:
        while len(run):
            group = self._chunk(run, self._size)
            yield group
            run = range(group.stop, run.stop)

    def _chunk(self, run: range, size: int) -> range:
        """The first chunk of a run, of at most `size` tasks."""
        if len(run) <= 1 or size <= 1:
            return run[:1]
        group = run if len(run) <= size else range(run.start, self._best_end(run, size))
        return group if self._room(group) <= self._most else self._chunk(run, (len(group) + 1) // 2)

    def _best_end(self, run: range, size: int) -> int:
        """Where the fewest bytes go on within the run, which else would be inner."""
        latest = min(run.start + size, run.stop)
        crossing = [0] * (latest - run.start + 1)
        for b in {b for n in run[: latest - run.start] for b in self._graph.tasks[n].touches}:
            if self._is_inner(b, run):
                crossing[self._first[b] + 1 - run.start] += self._graph.buffers[b].nbytes
                if self._last[b] < latest:
                    crossing[self._last[b] + 1 - run.start] -= self._graph.buffers[b].nbytes
        best, least, now = latest, None, crossing[0]
        for end in range(1, latest - run.start + 1):
            now += crossing[end]
            if end > size // 2 and (least is None or now <= least):
                best, least = run.start + end, now
        return best

    def _is_inner(self, b: int, group: Sequence[int]) -> bool:
        within = group[0] <= self._first[b] and self._last[b] <= group[-1]
        return within and not self._stays[b]

    def _room(self, group: Sequence[int]) -> int:
        """The bytes of a device that a chunk needs."""
        workspace = self._pack(group)
        touched = {b for n in group for b in self._graph.tasks[n].touches} - workspace.inner.keys()
        apart = workspace.nbytes if workspace.nbytes > SMALL_WORKSPACE else 0
        return sum(self._graph.align(self._graph.buffers[b].nbytes) for b in touched) + apart

    def _pack(self, group: Sequence[int]) -> _Workspace:
        tasks = [self._graph.tasks[n] for n in group]
        inner = [
            b for b in dict.fromkeys(b for task in tasks for b in task.touches)
            if len(group) > 1 and self._is_inner(b, group)
        ]  # fmt: skip
        blocks = [
            (self._graph.buffers[b].nbytes, self._first[b] - group[0], self._last[b] + 1 - group[0])
            for b in inner
        ]
        blocks += [(task.workspace, n, n + 1) for n, task in enumerate(tasks)]
        offsets = pack_blocks(blocks, self._graph.alignment)
        places = [
            range(at, at + nbytes) for at, (nbytes, _, _) in zip(offsets, blocks, strict=True)
        ]
        end = max(place.stop for place in places)
        return _Workspace(
            end if end <= self._scratch else max(end, SMALL_WORKSPACE + 1),
            dict(zip(inner, places, strict=False)),
            offsets[len(inner) :],
        )

    def with_workspace(self, chunk: Task, group: Sequence[int]) -> Task:
        """The chunk with its inner buffers in its workspace."""
        workspace = self._pack(group)
        kernel: Any = chunk.kernel
        if kernel is not None:
            moved = [
                _move(call, apart)
                for n, apart in zip(group, workspace.apart, strict=True)
                for call in self._graph.tasks[n].kernel.calls
            ]
            kernel = Calls(tuple(moved), workspace.inner)
        return replace(
            chunk,
            reads=tuple(b for b in chunk.reads if b not in workspace.inner),
            writes=tuple(b for b in chunk.writes if b not in workspace.inner),
            workspace=workspace.nbytes,
            kernel=kernel,
        )


def _move(call: Any, begin: int) -> Any:
    """The call, whose own allocations begin here in the workspace."""
    if not call.allocations or not begin:
        return call
    return replace(
        call,
        allocations=tuple(
            a if a.offset is None else replace(a, offset=a.offset + begin) for a in call.allocations
        ),
    )
