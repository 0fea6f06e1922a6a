"""The proof against brute force: all pairs of accesses, and a walk along the edges for each.

Two kinds of MemGraphs: noise (random bytes, random edges), and sound ones that a pager makes, who
cuts each arena into cells of one size, and moves whatever was used longest ago. Of these every edge
that no other path implies must be missed when it is taken away.
"""

import hashlib
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.counted_calls import calls_of
from support.products import examples

from offload.errors import RaceFound
from offload.graph.builder import GraphBuilder
from offload.graph.memgraph import (
    ALIGNMENT,
    OFFLOAD,
    RELOAD,
    TASK,
    Access,
    MemGraph,
    Node,
    Place,
    lane_name,
)
from offload.graph.taskgraph import HOST, Role, TaskGraph
from offload.planning.verify import verify

MemoryOf = dict[int, bytearray]

# A pager


@dataclass
class Pager:
    """Runs the tasks in order over `cells` cells of a device; writes down what it did."""

    graph: TaskGraph
    cells: int
    size: int
    nodes: list[Node] = field(default_factory=list)
    at: dict[int, int] = field(default_factory=dict)  # buffer -> cell, in order of use
    dirty: set[int] = field(default_factory=set)
    writer: dict[tuple[int, int], int] = field(default_factory=dict)  # (arena, cell) -> node
    readers: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    where: list[int] = field(default_factory=list)  # task -> node
    free: list[int] = field(default_factory=list)

    def run(self) -> MemGraph:
        self.free = list(range(self.cells))
        uses = {b: n for n, task in enumerate(self.graph.tasks) for b in task.touches}
        kept = {b for b, buffer in enumerate(self.graph.buffers) if buffer.persistent}
        kept |= set(self.graph.outputs)
        for number, task in enumerate(self.graph.tasks):
            for b in task.touches:
                self.bring(b, number, load=b in task.reads)
            accesses = [self.access(b, 0, b in task.reads, b in task.writes) for b in task.touches]
            if task.workspace:
                cell = self.room(number)
                self.free.append(cell)
                place = Place(0, cell * self.size, task.workspace)
                accesses.append(Access(place, None, False, True))
            after = [self.where[a] for a in task.after]
            self.where.append(self.add(TASK, "compute", accesses, after, task=number))
            self.dirty.update(task.writes)
            for b in task.touches:
                if uses[b] == number and b not in kept:  # dead
                    self.free.append(self.at.pop(b))
                    self.dirty.discard(b)
        for b in sorted(kept & self.dirty):
            self.copy(OFFLOAD, b, len(self.graph.tasks) - 1)
        host = {b: self.place(b, HOST) for b in range(len(self.graph.buffers))}
        return MemGraph(
            self.graph,
            tuple(self.nodes),
            {0: self.cells * self.size, HOST: len(self.graph.buffers) * self.size},
            {
                b: host[b]
                for b, buffer in enumerate(self.graph.buffers)
                if buffer.persistent or buffer.role is Role.INPUT
            },
            {b: host[b] for b in self.graph.outputs},
            (),
            {},
        )

    def bring(self, b: int, task: int, load: bool) -> None:
        if b in self.at:
            self.at[b] = self.at.pop(b)
            return
        cell = self.room(task)
        self.at[b] = cell
        if load:
            self.copy(RELOAD, b, task)

    def room(self, task: int) -> int:
        if self.free:
            return self.free.pop(0)
        touched = self.graph.tasks[task].touches
        victim = next(b for b in self.at if b not in touched)
        if victim in self.dirty:
            self.copy(OFFLOAD, victim, task)
            self.dirty.discard(victim)
        return self.at.pop(victim)

    def copy(self, kind: str, b: int, task: int) -> None:
        way = (0, HOST) if kind == OFFLOAD else (HOST, 0)
        accesses = [self.access(b, way[0], True, False), self.access(b, way[1], False, True)]
        lane = lane_name("d2h" if kind == OFFLOAD else "h2d")
        nbytes = self.graph.buffers[b].nbytes
        self.add(kind, lane, accesses, [], task=task, buffer=b, nbytes=nbytes)

    def place(self, b: int, arena: int) -> Place:
        cell = b if arena == HOST else self.at[b]
        return Place(arena, cell * self.size, self.graph.buffers[b].nbytes)

    def access(self, b: int, arena: int, reads: bool, writes: bool) -> Access:
        return Access(self.place(b, arena), b, reads, writes)

    def add(
        self, kind: str, lane: str, accesses: Sequence[Access], after: list[int], **more: int
    ) -> int:
        number = len(self.nodes)
        deps = set(after)
        for access in accesses:
            cell = (access.place.arena, access.place.offset // self.size)
            before = [self.writer[cell]] if cell in self.writer else []
            if access.writes:
                before += self.readers.get(cell, [])
                self.writer[cell] = number
                self.readers[cell] = []
            else:
                self.readers.setdefault(cell, []).append(number)
            deps.update(before)
        self.nodes.append(Node(kind, lane, tuple(accesses), tuple(sorted(deps)), **more))
        return number


def steps(tasks: int, seed: int, size: int, wide: int = 3) -> TaskGraph:
    """A step of random tasks; mostly over what was made not long ago."""
    rng = np.random.default_rng(seed)
    builder = GraphBuilder()
    roles = [Role.PARAMETER, Role.INPUT, Role.STATE, Role.CONSTANT]
    known = [
        builder.buffer(f"p{n}", int(rng.integers(1, size + 1)), roles[n % 4])
        for n in range(max(2, tasks // 4))
    ]
    last, newest = -1, known[0]
    for n in range(tasks):
        at = len(known) - 1 - rng.geometric(0.15, size=wide) % len(known)
        reads = [known[k] for k in dict.fromkeys(at.tolist())]
        if rng.random() < 0.2:  # an old one
            reads = list(dict.fromkeys([known[int(rng.integers(len(known)))], *reads]))[:wide]
        if rng.random() < 0.25:  # in place
            newest = reads[0]
        elif rng.random() < 0.2:  # anew: what was there is dead
            newest = known[int(rng.integers(len(known)))]
            reads = [b for b in reads if b != newest]
        else:
            newest = builder.buffer(f"t{n}", int(rng.integers(1, size + 1)))
            known.append(newest)
        draws = last >= 0 and rng.random() < 0.1
        space = int(rng.integers(1, size)) if rng.random() < 0.1 else 0
        builder.task(f"f{n}", reads, [newest], after=(last,) if draws else (), workspace=space)
        last = n if draws or last < 0 else last
    builder.output(newest)
    graph = builder.graph()
    graph.check()
    return graph


# Brute force


def reachable(nodes: Sequence[Node], at: int) -> set[int]:
    """All that a node waits for, step by step."""
    seen: set[int] = set()
    stack = [at]
    while stack:
        for dep in nodes[stack.pop()].deps:
            if dep not in seen:
                seen.add(dep)
                stack.append(dep)
    return seen


def meet(a: Access, b: Access) -> bool:
    """Whether they touch a common byte, one of them writing."""
    one, two = a.place, b.place
    first = set(range(one.offset, one.offset + one.nbytes))
    return (
        one.arena == two.arena
        and (a.writes or b.writes)
        and not first.isdisjoint(range(two.offset, two.offset + two.nbytes))
    )


def races(nodes: Sequence[Node]) -> set[tuple[int, int]]:
    return {
        (a, b)
        for b in range(len(nodes))
        for a in range(b)
        if a not in reachable(nodes, b)
        if any(meet(one, two) for one in nodes[a].accesses for two in nodes[b].accesses)
    }


@st.composite
def noise(draw: st.DrawFn) -> MemGraph:
    """Tasks over a few bytes, each over buffers of its own."""
    builder = GraphBuilder()
    nodes: list[Node] = []
    for number in range(draw(st.integers(1, 12))):
        accesses: list[Access] = []
        at = 0
        for _ in range(draw(st.integers(1, 3))):
            at += draw(st.integers(0, 2))
            nbytes, reads = draw(st.integers(0, 130)), draw(st.booleans())
            b = builder.buffer(f"b{len(builder.buffers)}", nbytes)
            accesses.append(Access(Place(0, at * ALIGNMENT, nbytes), b, reads, not reads))
            at += -(-nbytes // ALIGNMENT)
        accesses.sort(key=lambda access: access.writes)  # as a task lists them
        deps = draw(st.sets(st.integers(0, number - 1), max_size=2)) if number else set()
        builder.task(
            f"f{number}",
            [a.buffer for a in accesses if a.reads and a.buffer is not None],
            [a.buffer for a in accesses if a.writes and a.buffer is not None],
        )
        nodes.append(Node(TASK, "compute", tuple(accesses), tuple(sorted(deps)), number))
    return MemGraph(builder.graph(), tuple(nodes), {0: 16 * ALIGNMENT}, {}, {}, (), {})


@given(noise())
@settings(max_examples=examples(400), deadline=None)
def test_the_verdict_on_noise_is_that_of_brute_force(memgraph: MemGraph) -> None:
    wrong = races(memgraph.nodes)
    names = {(memgraph.name(a), memgraph.name(b)) for a, b in wrong}
    reads = any(a.reads and a.place.nbytes for node in memgraph.nodes for a in node.accesses)
    if not wrong and not reads:
        verify(memgraph)
        return
    with pytest.raises(RaceFound) as caught:
        verify(memgraph)
    # Nobody made what is read here: found once the races are not.
    is_race = "nothing orders" in str(caught.value)
    assert is_race == bool(wrong)
    assert not is_race or (caught.value.task_a, caught.value.task_b) in names


def reduced(nodes: Sequence[Node]) -> list[Node]:
    """Without the edges that other paths imply."""
    slim = []
    for node in nodes:
        implied = {far for dep in node.deps for far in reachable(nodes, dep)}
        slim.append(replace(node, deps=tuple(d for d in node.deps if d not in implied)))
    return slim


@given(st.integers(1, 25), st.integers(5, 9), st.integers(0, 1 << 30))
@settings(max_examples=examples(100), deadline=None)
def test_every_edge_that_nothing_else_implies_is_missed(tasks: int, cells: int, seed: int) -> None:
    size = 2 * ALIGNMENT
    sound = Pager(steps(tasks, seed, size), cells, size).run()
    slim = reduced(sound.nodes)
    assert not races(slim)
    verify(sound)
    verify(replace(sound, nodes=tuple(slim)))
    for number, node in enumerate(slim):
        for dep in node.deps:
            less = list(slim)
            less[number] = replace(node, deps=tuple(d for d in node.deps if d != dep))
            with pytest.raises(RaceFound, match="nothing orders"):
                verify(replace(sound, nodes=tuple(less)))


# Bytes


def made(name: str, read: Sequence[bytes], nbytes: int) -> bytes:
    """What a task makes of what it reads."""
    return hashlib.shake_128(b"|".join([name.encode(), *read])).digest(nbytes)


def contents(graph: TaskGraph) -> list[bytes]:
    """Of every buffer, after the tasks ran one after the other."""
    held = [made(buffer.name, (), buffer.nbytes) for buffer in graph.buffers]
    for task in graph.tasks:
        read = [held[b] for b in task.reads]
        for b in task.writes:
            held[b] = made(task.name, read, graph.buffers[b].nbytes)
    return held


def run(memgraph: MemGraph, seed: int) -> MemoryOf:
    """Every node once, in an order that the edges allow; arenas full of dirt before."""
    rng = np.random.default_rng(seed)
    memory = {arena: bytearray(rng.bytes(size)) for arena, size in memgraph.arenas.items()}
    for b, place in memgraph.starts.items():
        memory[place.arena][place.offset : place.offset + place.nbytes] = made(
            memgraph.graph.buffers[b].name, (), place.nbytes
        )
    left = {number: set(node.deps) for number, node in enumerate(memgraph.nodes)}
    while left:
        ready = [number for number, deps in left.items() if not deps & left.keys()]
        number = ready[int(rng.integers(len(ready)))]
        del left[number]
        node = memgraph.nodes[number]
        read = [bytes(look(memory, a.place)) for a in node.accesses if a.reads]
        for access in node.accesses:
            if access.buffer is None:
                look(memory, access.place)[:] = rng.bytes(access.place.nbytes)
            elif access.writes:
                nbytes = access.place.nbytes
                result = made(memgraph.name(number), read, nbytes) if node.kind == TASK else read[0]
                look(memory, access.place)[:] = result
    return memory


def look(memory: MemoryOf, place: Place) -> memoryview:
    return memoryview(memory[place.arena])[place.offset : place.offset + place.nbytes]


def right(memgraph: MemGraph, seed: int) -> bool:
    """Whether a run leaves outputs and persistent buffers as the graph means it."""
    expected, memory = contents(memgraph.graph), run(memgraph, seed)
    homes = {b: p for b, p in memgraph.starts.items() if memgraph.graph.buffers[b].persistent}
    return all(
        look(memory, place) == expected[b]
        for places in (homes, memgraph.ends)
        for b, place in places.items()
    )


@given(st.integers(2, 25), st.integers(5, 7), st.integers(0, 1 << 30), st.data())
@settings(max_examples=examples(400), deadline=None)
def test_what_passes_gives_the_right_bytes_in_every_order(
    tasks: int, cells: int, seed: int, data: st.DataObject
) -> None:
    """One access of a sound MemGraph goes to another cell, or one copy does nothing."""
    size = 2 * ALIGNMENT
    sound = Pager(steps(tasks, seed, size), cells, size).run()
    assert all(right(sound, order) for order in range(3))
    number = data.draw(st.integers(0, len(sound.nodes) - 1))
    node = sound.nodes[number]
    nodes = list(sound.nodes)
    if node.kind != TASK and data.draw(st.booleans()):
        del nodes[number]
        for later in range(number, len(nodes)):
            deps = {d for d in nodes[later].deps if d != number}
            deps |= set(node.deps) if number in nodes[later].deps else set()
            moved = tuple(sorted(d - (d > number) for d in deps))
            nodes[later] = replace(nodes[later], deps=moved)
    else:
        k = data.draw(st.integers(0, len(node.accesses) - 1))
        access = node.accesses[k]
        cell = data.draw(st.integers(0, sound.arenas[access.place.arena] // size - 1))
        accesses = list(node.accesses)
        accesses[k] = replace(access, place=replace(access.place, offset=cell * size))
        nodes[number] = replace(node, accesses=tuple(accesses))
    broken = replace(sound, nodes=tuple(nodes))
    try:
        verify(broken)
    except RaceFound:
        return
    assert all(right(broken, order) for order in range(10))


def test_questions_are_answered_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("offload.planning.verify"), "SOURCES", 3)
    size = 2 * ALIGNMENT
    sound = Pager(steps(60, 7, size), 5, size).run()
    slim = reduced(sound.nodes)
    verify(replace(sound, nodes=tuple(slim)))
    for number, node in enumerate(slim):
        if node.deps:
            less = list(slim)
            less[number] = replace(node, deps=node.deps[1:])
            with pytest.raises(RaceFound, match="nothing orders"):
                verify(replace(sound, nodes=tuple(less)))


def test_the_work_of_verifying_grows_with_the_number_of_tasks() -> None:
    size = 16 * ALIGNMENT
    small, large = (Pager(steps(count, 0, size), 20, size).run() for count in (200, 2000))
    assert calls_of(lambda: verify(large)) <= 1.3 * 10 * calls_of(lambda: verify(small))
