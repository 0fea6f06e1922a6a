"""Joins the micro-batches of a step in one graph: a weight comes in once for several. Pure.

    one by one       F1 F2 B2 B1 | f1 f2 b2 b1 U       every weight twice a micro-batch
    layer by layer   F1 f1 F2 B2 f2 b2 B1 b1 U         twice a step: w1 serves F1 and f1, ...

`joined` puts the graphs of the micro-batches one after the other, over the same persistent tensors.
If one of them updates, the sums of gradients are no longer persistent: the first micro-batch makes
them, and they die with the update. If none of them updates, the sums stay, and each comes in and
goes out once for all of them. (`turns.py` finds out which it is.)

`layer_by_layer` only reorders. A piece is a run of tasks that begins where other weights are
needed. The pieces of several micro-batches take turns, and what a task depends on always goes
first. So sums, statistics and random draws keep their order, and every bit stays. Tasks that were
merged within a micro-batch (merging.py) take turns as any other task does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from typing import Any

from offload.errors import GraphError
from offload.graph.taskgraph import RANKS, Buffer, Role, Task, TaskGraph
from offload.planning.cuts import begun_at
from offload.planning.residency import SMALL

ONCE = "a weight moves once for"
"""How the note of a graph begins in which weights move once for several micro-batches."""


def joined(
    graphs: Sequence[TaskGraph], *, sums_stay: bool = False, draws_apart: bool = False
) -> TaskGraph:
    """One graph for all of them, with the inputs, outputs and calls after the step in their
    order. `sums_stay`: sums of gradients outlive the graph. `draws_apart`: no two of them draw from
    the same generator, so no draw waits for one of another micro-batch."""
    whole = _Joined(sums_stay, draws_apart)
    for turn, graph in enumerate(graphs):
        whole.add(graph, turn)
    return whole.finish(graphs)


class _Joined:
    """The joint graph, which grows by one graph at a time."""

    def __init__(self, sums_stay: bool, draws_apart: bool) -> None:
        self._sums_stay, self._draws_apart = sums_stay, draws_apart
        self._sums: set[str] = set()
        """Tensors that only these micro-batches need."""
        self._buffers: list[Buffer] = []
        self._tasks: list[Task] = []
        self._outputs: list[int] = []
        self._tensors: dict[str, Any] = {}
        """The user's tensors, by their names in the joint graph."""
        self._names: dict[Any, str] = {}
        """The name of each of the user's tensors in the joint graph."""
        self._known: dict[tuple[str, int, int], int] = {}
        """The buffer of each piece of a tensor."""
        self._programs: list[Any] = []
        self._drawn: list[int] = []
        """Tasks that the next random draws must wait for."""

    def add(self, graph: TaskGraph, turn: int) -> None:
        names = {b: self._buffer(graph, buffer, turn) for b, buffer in enumerate(graph.buffers)}
        base = len(self._tasks)
        held = _held(graph)
        for number, task in enumerate(graph.tasks):
            before = tuple(base + a for a in task.after)
            if number in held and not before and not self._draws_apart:
                before = tuple(self._drawn)
            self._tasks.append(
                replace(task.renamed(names), name=f"{task.name} [{turn}]", after=before, turn=turn)
            )
        waited_for = {a for task in graph.tasks for a in task.after}
        self._drawn = [base + number for number in sorted(held - waited_for)] or self._drawn
        self._outputs += [names[b] for b in graph.outputs]
        if graph.program is not None:
            self._programs.append(graph.program.renamed(names))

    def _buffer(self, graph: TaskGraph, buffer: Buffer, turn: int) -> int:
        if not buffer.persistent:
            return self._new(replace(buffer, name=f"{buffer.name} [{turn}]"))
        name = self._tensor(graph.program, buffer.tensor, turn)
        piece = name, buffer.start, buffer.nbytes
        if piece not in self._known:
            if buffer.role is Role.SUM and not self._sums_stay:
                self._sums.add(name)
                buffer = replace(buffer, role=Role.GRADIENT)
            self._known[piece] = self._new(replace(buffer, tensor=name))
        return self._known[piece]

    def _new(self, buffer: Buffer) -> int:
        self._buffers.append(buffer)
        return len(self._buffers) - 1

    def _tensor(self, program: Any, tensor: str, turn: int) -> str:
        """The tensor's name here. Literals of two traces may have the same name and be
        different."""
        if program is None:
            return tensor
        source = program.tensors[tensor]
        sources = source if isinstance(source, tuple | list) else (source,)
        keys = [tensor if callable(one) else id(one) for one in sources]
        name = next((self._names[key] for key in keys if key in self._names), None)
        if name is None:
            name = tensor if tensor not in self._tensors else f"{tensor} [{turn}]"
            self._tensors[name] = source
        elif len(sources) > 1:
            before = self._tensors[name]
            before = before if isinstance(before, tuple | list) else (before,)
            self._tensors[name] = tuple({id(one): one for one in (*before, *sources)}.values())
        self._names.update(dict.fromkeys(keys, name))
        return name

    def finish(self, graphs: Sequence[TaskGraph]) -> TaskGraph:
        self._check_outputs()
        self._check_pieces()
        if any(graph.kept for graph in graphs):
            raise GraphError("join the micro-batches first, and then put other tensors beside them")
        notes = dict.fromkeys(chain.from_iterable(graph.notes for graph in graphs))
        graph = TaskGraph(
            tuple(self._buffers),
            tuple(self._tasks),
            tuple(self._outputs),
            self._program() if self._programs else None,
            tuple(notes),
        )
        graph.check()
        return graph

    def _program(self) -> Any:
        return replace(
            self._programs[-1],
            inputs=tuple(chain.from_iterable(p.inputs for p in self._programs)),
            outputs=tuple(chain.from_iterable(p.outputs for p in self._programs)),
            tensors={
                name: source for name, source in self._tensors.items() if name not in self._sums
            },
            recapture=None,
            after_step=tuple(chain.from_iterable(p.after_step for p in self._programs)),
        )

    def _check_outputs(self) -> None:
        """Check that no output is changed after its micro-batch."""
        changed = {b for task in self._tasks for b in task.writes}
        for b in self._outputs:
            if self._buffers[b].persistent and b in changed:
                raise GraphError(
                    f"a micro-batch returns {self._buffers[b].name}, and later ones change it."
                    " Return a copy of it (.clone())"
                )

    def _check_pieces(self) -> None:
        """Check that all graphs cut their tensors alike."""
        ends: dict[str, int] = {}
        for name, start, nbytes in sorted(self._known):
            if ends.get(name, 0) != start:
                raise GraphError(
                    f"the micro-batches cut tensor {name} into different pieces. Capture them alike"
                )
            ends[name] = start + nbytes


def _held(graph: TaskGraph) -> set[int]:
    """Tasks that buffers alone do not order."""
    held = {a for task in graph.tasks for a in task.after}
    return held.union(
        n for n, task in enumerate(graph.tasks) if task.after or task.random or task.lane == RANKS
    )


def orders(graph: TaskGraph) -> Iterator[tuple[str, TaskGraph]]:
    """The graph as it is, then with weights that move once for fewer and fewer micro-batches."""
    yield "", graph
    turns = 1 + max((task.turn for task in graph.tasks), default=0)
    if turns > 1:
        for together in dict.fromkeys((turns, (turns + 1) // 2)):
            if together > 1:
                name = f"weights move once for {together} micro-batches"
                yield name, layer_by_layer(graph, together)


def layer_by_layer(graph: TaskGraph, together: int, nbytes: int = SMALL) -> TaskGraph:
    """Let pieces of `together` micro-batches take turns. A piece begins where other weights are
    needed. Weights below `nbytes` do not count."""
    turns: dict[int, list[int]] = {}
    for number, task in enumerate(graph.tasks):
        turns.setdefault(task.turn, []).append(number)
    cut = [begun_at(turns[turn], _borders(graph, turns[turn], nbytes)) for turn in sorted(turns)]
    wanted: list[int] = []
    for first in range(0, len(cut), together):
        for pieces in zip_longest(*cut[first : first + together], fillvalue=()):
            wanted += chain.from_iterable(pieces)
    order = _completed(graph.dependencies(), wanted)
    return graph.reordered(order, f"{ONCE} {together} micro-batches")


def _borders(graph: TaskGraph, tasks: Sequence[int], nbytes: int) -> set[int]:
    """The tasks at which other weights are needed. An update stays with its gradient."""
    found: set[int] = set()
    now: set[int] = set()
    for number in tasks:
        task = graph.tasks[number]
        weights = {
            b
            for b in task.touches
            if graph.buffers[b].role is Role.PARAMETER and graph.buffers[b].nbytes >= nbytes
        }
        if task.phase != "update" and not weights <= now:
            found.add(number)
            now = weights
    return found


def _completed(needed: Sequence[Sequence[int]], wanted: Sequence[int]) -> list[int]:
    """All tasks in the wanted order, except that each comes after those that it needs."""
    done = [False] * len(needed)
    order: list[int] = []
    for task in wanted:
        waiting = [task]
        while waiting:
            now = waiting[-1]
            missing = [] if done[now] else [before for before in needed[now] if not done[before]]
            if missing:
                waiting += reversed(missing)
                continue
            waiting.pop()
            if not done[now]:
                done[now] = True
                order.append(now)
    return order
