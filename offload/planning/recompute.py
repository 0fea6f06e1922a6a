"""Computes activations once more instead of keeping or moving them. Pure.

    f: x w -> a  ...  b: a g -> h     ->     f: x w -> a  ...  f again: x w -> a'  b: a' g -> h

In between, `a` needs no room at all. It pays if f is quick and `a` is large: a norm, an activation
function, a cast. The inputs of f must be there, unchanged, when it runs again: a parameter, or an
activation that is kept until then anyway. So no other buffer lives longer. An input of f may itself
be recomputed just before, in a short chain.

The search plans and simulates the graphs of `variants` and keeps the best. With less recomputing
there is less work but also less room.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from offload.errors import GraphError
from offload.graph.costs import Costs
from offload.graph.taskgraph import Buffer, Role, Task, TaskGraph

LONGEST_CHAIN = 4
SMALLEST = 64 << 10
"""Smaller activations, in bytes, never matter."""
SHARES = (1.0, 0.5, 0.25, 0.125, 0.75)
"""Shares of the bytes that can be recomputed, cheapest first. They are tried in this order."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An activation that can be recomputed."""

    ratio: float
    """Seconds to compute it again, divided by seconds to move it out and in."""
    buffer: int
    chain: tuple[int, ...]
    """The tasks that run again for it; its own task is the last."""


@dataclass(slots=True)
class _Uses:
    """The tasks that make and read each buffer."""

    graph: TaskGraph
    writers: dict[int, list[int]]
    needed: dict[int, int]
    """By buffer: the first backward task that reads it."""
    last: Mapping[int, int]

    @classmethod
    def from_graph(cls, graph: TaskGraph) -> "_Uses":
        writers: dict[int, list[int]] = {}
        needed: dict[int, int] = {}
        for number, task in enumerate(graph.tasks):
            for b in task.writes:
                writers.setdefault(b, []).append(number)
            if task.phase != "forward":
                for b in task.reads:
                    needed.setdefault(b, number)
        return cls(graph, writers, needed, graph.spans()[1])

    def find_maker(self, b: int) -> int | None:
        """The only task that makes the buffer, if that task may run again."""
        makers = self.writers.get(b, ())
        if len(makers) != 1 or b in self.graph.outputs:
            return None
        task = self.graph.tasks[makers[0]]
        again = task.repeatable and task.lane == "compute" and task.phase == "forward"
        kept = any(_is_kept(self.graph.buffers[w]) or w in task.reads for w in task.writes)
        if not again or kept or task.after:
            return None
        return makers[0]

    def is_unchanged(self, b: int, since: int, until: int) -> bool:
        return not any(since < writer < until for writer in self.writers.get(b, ()))

    def is_there(self, b: int, until: int) -> bool:
        """Whether the buffer is kept until then anyway."""
        return self.graph.buffers[b].persistent or self.last[b] >= until


def find_candidates(graph: TaskGraph, costs: Costs, smallest: int = SMALLEST) -> list[Candidate]:
    """What can be recomputed without keeping other buffers longer, cheapest first."""
    uses = _Uses.from_graph(graph)
    possible: list[Candidate] = []
    for b, until in uses.needed.items():
        nbytes = graph.buffers[b].nbytes
        chain = _find_chain(uses, b, until) if nbytes >= smallest else ()
        if not chain:
            continue
        again = sum(costs.of_task(graph.tasks[uses.writers[c][0]]) for c in chain)
        move = costs.of_copy("offload", nbytes) + costs.of_copy("reload", nbytes)
        possible.append(Candidate(again / move, b, chain))
    return sorted(possible, key=lambda candidate: (candidate.ratio, candidate.buffer))


def recompute_buffers(graph: TaskGraph, buffers: Collection[int]) -> TaskGraph:
    """The graph in which these activations are computed again before the backward pass reads
    them."""
    uses = _Uses.from_graph(graph)
    points = _find_points(uses, buffers)
    known = list(graph.buffers)
    before: dict[int, list[int]] = {}
    for b in sorted(points, key=lambda b: uses.writers[b][0]):
        before.setdefault(points[b], []).append(b)
    names: dict[int, int] = {}
    tasks: list[Task] = []
    place: list[int] = []
    for number, task in enumerate(graph.tasks):
        for b in before.get(number, ()):
            tasks.append(_repeat_task(graph.tasks[uses.writers[b][0]], b, names, known))
        place.append(len(tasks))
        renamed = task if names.keys().isdisjoint(task.touches) else task.rename(names)
        tasks.append(replace(renamed, after=tuple(place[a] for a in task.after)))
    moved = sum(graph.buffers[b].nbytes for b in points)
    note = f"{len(points)} activations ({moved >> 20} MiB) are recomputed" if points else ""
    return graph.with_tasks(tasks, known, note)


def variants(graph: TaskGraph, costs: Costs) -> Iterator[tuple[str, TaskGraph]]:
    """Different graphs: the graph itself, then with more or less of it recomputed."""
    yield "none", graph
    for share, chosen in list_choices(graph, costs):
        yield f"{share:.0%} of what can be", recompute_buffers(graph, chosen)


def list_choices(graph: TaskGraph, costs: Costs) -> Iterator[tuple[float, frozenset[int]]]:
    """Different sets of activations to recompute, each with its share of what can be."""
    possible = find_candidates(graph, costs)
    whole = sum(graph.buffers[c.buffer].nbytes for c in possible)
    seen: set[frozenset[int]] = {frozenset()}
    for share in SHARES:
        chosen: set[int] = set()
        left = share * whole
        for candidate in possible:
            left -= graph.buffers[candidate.buffer].nbytes
            if left < 0:
                break
            chosen.update(candidate.chain)
        if (key := frozenset(chosen)) not in seen:
            seen.add(key)
            yield share, key


def _is_kept(buffer: Buffer) -> bool:
    return buffer.persistent or buffer.role is Role.INPUT


def _find_chain(uses: _Uses, b: int, until: int, longest: int = LONGEST_CHAIN) -> tuple[int, ...]:
    """The buffers to make again to have `b` at `until`, with `b` last; empty if that is
    impossible."""
    number = uses.find_maker(b)
    if number is None or number >= until or longest == 0:
        return ()
    task = uses.graph.tasks[number]
    beside = sum(uses.graph.buffers[w].nbytes for w in task.writes if w != b)
    if beside * 4 > uses.graph.buffers[b].nbytes:
        return ()
    chain: list[int] = []
    for read in task.reads:
        if uses.is_there(read, until) and uses.is_unchanged(read, number, until):
            continue
        more = _find_chain(uses, read, until, longest - 1 - len(chain))
        if not more:
            return ()
        chain.extend(c for c in more if c not in chain)
    return (*chain, b)


def _find_points(uses: _Uses, buffers: Collection[int]) -> dict[int, int]:
    """By buffer: the task before which it is made again. That is the first backward task that reads
    it, or the first one before which something else is made again from it."""
    points: dict[int, int] = {}
    known = uses.graph.buffers
    makers = {b: uses.find_maker(b) for b in buffers}
    for b, number in makers.items():
        if number is None:
            raise GraphError(f"{known[b].name} cannot be recomputed; see `find_candidates`")
    demand = {b: uses.needed[b] for b in buffers if b in uses.needed}
    for b in sorted(buffers, key=lambda b: makers[b] or 0, reverse=True):
        number = makers[b]
        if number is None or b not in demand:
            raise GraphError(f"{known[b].name} is not needed again; see `find_candidates`")
        points[b] = demand[b]
        for read in uses.graph.tasks[number].reads:
            if read in makers:
                demand[read] = min(demand.get(read, points[b]), points[b])
            elif not uses.is_unchanged(read, number, points[b]):
                raise GraphError(
                    f"{known[b].name} cannot be recomputed before"
                    f" {uses.graph.tasks[points[b]].name}: {known[read].name} changes"
                )
    return points


def _repeat_task(task: Task, b: int, names: dict[int, int], known: list[Buffer]) -> Task:
    """The task once more, with new buffers for its results. From then on `b` means the new one."""
    fresh = dict(names)
    for written in task.writes:
        known.append(replace(known[written], name=f"{known[written].name} again"))
        fresh[written] = len(known) - 1
    names[b] = fresh[b]
    return replace(
        task.rename(fresh), name=f"{task.name} again", recomputes=task.name, phase="backward"
    )
