"""The proof against brute force: all pairs of accesses, a walk for each, and the bytes of a run."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.any_graphs import graphs
from support.counted_calls import calls_of
from support.hand_made_plans import planned, training
from support.products import examples

from offload.errors import RaceFound
from offload.graph.builder import GraphBuilder
from offload.graph.memgraph import (
    ALIGNMENT,
    TASK,
    Access,
    MemGraph,
    Node,
    Place,
)
from offload.graph.taskgraph import TaskGraph
from offload.planning.planner import Policy, build_memgraph
from offload.planning.refusal import smallest_budget
from offload.planning.verify import verify

MemoryOf = dict[int, bytearray]

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


@given(graphs(), st.sampled_from([0, 192, 5000]), st.data())
@settings(max_examples=examples(400), deadline=None)
def test_what_passes_gives_the_right_bytes_in_every_order(
    graph: TaskGraph, spare: int, data: st.DataObject
) -> None:
    """One access of a sound MemGraph goes to another place, or one copy does nothing."""
    room = {d: max(64, smallest_budget(graph, d)[0] + spare) for d in graph.devices}
    sound = build_memgraph(graph, room, Policy())
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
    elif node.accesses:
        k = data.draw(st.integers(0, len(node.accesses) - 1))
        access = node.accesses[k]
        offset = data.draw(st.integers(0, sound.arenas[access.place.arena] // ALIGNMENT))
        accesses = list(node.accesses)
        accesses[k] = replace(access, place=replace(access.place, offset=offset * ALIGNMENT))
        nodes[number] = replace(node, accesses=tuple(accesses))
    broken = replace(sound, nodes=tuple(nodes))
    try:
        verify(broken)
    except RaceFound:
        return
    assert all(right(broken, order) for order in range(10))


def test_the_work_of_verifying_grows_with_the_number_of_tasks() -> None:
    small, large = (planned(training(layers), 80) for layers in (50, 500))
    assert calls_of(lambda: verify(large)) <= 1.3 * 10 * calls_of(lambda: verify(small))
