"""The DISCO paper's own example, its Figures 4 to 9, and its Figures 2 and 3.

    GPU 1   A  B   3 = A x 1   4 = B x 2   8 = 3 + 4        1: C -> GPU 1
    GPU 2   C  D   5 = C x D   9 = 5 + 7                    2: E -> GPU 1
    GPU 3   E  F   6 = E x F                                7: 6 -> GPU 2

What the text fixes: six kernels, three transfers; GPU 1 holds A, B and what 1, 2, 3, 4 and 8 make;
3 is the only consumer of A and of 1, 4 that of 2; 8 reads 3. A location has 64 bytes.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest

import offload
from offload import Costs, GraphBuilder, MemGraph, RaceFound, TaskGraph, simulate
from offload.graph.memgraph import OFFLOAD, RELOAD, SEND, Node
from offload.planning.planner import Policy, build_memgraph
from offload.planning.reduction import reduce_edges

LOCATION = 64
FIRST = ("3", "4", "5", "6", "8", "9")
SECOND = ("4", "3", "5", "6", "8", "9")
"""The order in which Figure 9 fills four locations: 4 runs while A is away."""
READS = {"3": "AC", "4": "BE", "5": "CD", "6": "EF", "8": "34", "9": "56"}
GPU_OF = dict.fromkeys("AB348", 0) | dict.fromkeys("CD59", 1) | dict.fromkeys("EF6", 2)
SENDS = {"1": "send C", "2": "send E", "7": "send 6"}
"""The transfers of the paper: the plan makes them."""


def example(order: Sequence[str] = FIRST) -> TaskGraph:
    """An input vertex makes its tensor, so that the host has no copy of it."""
    builder = GraphBuilder()
    buffers = {name: builder.buffer(name, LOCATION, "activation") for name in "ABCDEF"}
    for name in "ABCDEF":
        builder.task(name, writes=[buffers[name]], device=GPU_OF[name])
    for name in order:
        reads = [buffers[read] for read in READS[name]]
        buffers[name] = builder.buffer(name, LOCATION, "activation")
        builder.task(name, reads, [buffers[name]], device=GPU_OF[name])
    builder.output(buffers["8"])
    builder.output(buffers["9"])
    return builder.graph()


def built(order: Sequence[str], locations: int) -> MemGraph:
    """BUILDMEMGRAPH for three GPUs of so many locations, its edges reduced."""
    capacities = dict.fromkeys(range(3), locations * LOCATION)
    memgraph = build_memgraph(example(order), capacities, Policy())
    deps = reduce_edges([node.deps for node in memgraph.nodes])
    nodes = [replace(n, deps=d) for n, d in zip(memgraph.nodes, deps, strict=True)]
    memgraph = replace(memgraph, nodes=tuple(nodes))
    offload.verify(memgraph)
    assert all(memgraph.arenas[gpu] <= locations * LOCATION for gpu in range(3))
    return memgraph


def copies(memgraph: MemGraph) -> list[str]:
    """Those over the host."""
    kinds = (OFFLOAD, RELOAD)
    return [memgraph.name(n) for n, node in enumerate(memgraph.nodes) if node.kind in kinds]


def named(memgraph: MemGraph, name: str) -> int:
    [number] = [n for n in range(len(memgraph.nodes)) if memgraph.name(n) == SENDS.get(name, name)]
    return number


def place_of(memgraph: MemGraph, node: str) -> int:
    """Where on its GPU the last of what a node touches lies: what it makes."""
    return memgraph.nodes[named(memgraph, node)].accesses[-1].place.offset


def waits(memgraph: MemGraph, node: str, before: str) -> bool:
    """Whether a path says so."""
    seen, left = set(), [named(memgraph, node)]
    while left:
        for dep in memgraph.nodes[left.pop()].deps:
            if dep not in seen:
                seen.add(dep)
                left.append(dep)
    return named(memgraph, before) in seen


def without_edge(memgraph: MemGraph, node: str, before: str) -> MemGraph:
    at, gone = named(memgraph, node), named(memgraph, before)
    nodes = list(memgraph.nodes)
    assert gone in nodes[at].deps
    nodes[at] = replace(nodes[at], deps=tuple(d for d in nodes[at].deps if d != gone))
    return replace(memgraph, nodes=tuple(nodes))


def test_seven_locations_need_neither_copies_nor_memory_dependencies() -> None:
    memgraph = built(FIRST, 7)
    assert copies(memgraph) == []
    needed = memgraph.graph.dependencies()
    for node in memgraph.nodes:
        if node.accesses[-1].place.arena == 0:
            befores = {node.task, *needed[node.task]}
            assert {memgraph.nodes[dep].task for dep in node.deps} <= befores
    assert [memgraph.name(n) for n, node in enumerate(memgraph.nodes) if node.kind == SEND] == [
        "send C", "send E", "send 6"
    ]  # fmt: skip


def test_with_five_locations_4_and_8_take_the_places_of_a_and_1() -> None:
    memgraph = built(FIRST, 5)
    assert copies(memgraph) == []  # Figure 5: seven tensors, five locations
    assert {place_of(memgraph, n) for n in "48"} == {place_of(memgraph, n) for n in "A1"}
    kept = [place_of(memgraph, n) for n in "B23"]
    assert len(set(kept)) == 3
    # Figure 7: 3, the only reader of what lay there, comes before both.
    assert waits(memgraph, "4", "3")
    assert waits(memgraph, "8", "3")
    with pytest.raises(RaceFound) as found:
        offload.verify(without_edge(memgraph, "4", "3"))
    assert {found.value.task_a, found.value.task_b} & {"3", "4"}


def test_with_three_locations_a_comes_back_when_4_has_run() -> None:
    """The paper has four: its transfers are there from the beginning, ours when they are read."""
    assert copies(built(SECOND, 4)) == []
    memgraph = built(SECOND, 3)
    away, home = "offload A", "reload A"
    assert copies(memgraph) == [away, "offload 4", home, "reload 4"]
    # Figure 9. What 4 makes lies where A lay, and waits for A to be gone;
    assert place_of(memgraph, "4") == place_of(memgraph, "A")
    assert waits(memgraph, "4", away)
    # A comes back to where an operand of 4 lay, and waits for 4, its only reader.
    assert place_of(memgraph, home) in {place_of(memgraph, n) for n in ("B", "2")}
    assert waits(memgraph, home, "4")
    assert waits(memgraph, home, away)
    assert waits(memgraph, "3", home)
    for node, before in (("4", away), (home, "4")):
        with pytest.raises(RaceFound):
            offload.verify(without_edge(memgraph, node, before))


def test_two_locations_are_refused_with_the_task_that_needs_three() -> None:
    with pytest.raises(offload.BudgetTooSmall) as refused:
        offload.plan(example(), dict.fromkeys(range(3), 2 * LOCATION))
    assert refused.value.needed == 3 * LOCATION
    assert refused.value.task in FIRST


# ---- Figures 2 and 3 ----------------------------------------------------------------------------

WEIGHT = 640
UNIT = Costs(h2d=WEIGHT, copy=0)
"""A weight takes a second over the bus."""


def layers(count: int) -> MemGraph:
    """X(i+1) = X(i) x Y(i), half of Y(i) on each of two GPUs that have room for one half."""
    builder = GraphBuilder()
    x = [builder.buffer(f"x{gpu}", 64) for gpu in (0, 1)]
    for gpu in (0, 1):
        builder.task(f"begin{gpu}", writes=[x[gpu]], device=gpu, seconds=0.0)
    for layer in range(count):
        for gpu in (0, 1):
            y = builder.buffer(f"y{layer}.{gpu}", WEIGHT, "parameter")
            made = builder.buffer(f"x{layer}.{gpu}", 64)
            builder.task(f"{layer}.{gpu}", [x[gpu], y], [made], device=gpu, seconds=1.0)
            x[gpu] = made
    for gpu in (0, 1):
        builder.output(x[gpu])
    graph = builder.graph()
    plan = offload.plan(graph, WEIGHT + 128, costs=UNIT, placement="copy")
    plan.verify()
    # One bus for both.
    nodes = [replace(n, lane="h2d") if n.kind == RELOAD else n for n in plan.memgraph.nodes]
    return replace(plan.memgraph, nodes=tuple(nodes))


def levelwise(memgraph: MemGraph) -> MemGraph:
    """The same, where a layer is loaded when the one before has run, and runs when it is loaded."""
    loads: dict[int, list[int]] = {}
    runs: dict[int, list[int]] = {}
    nodes: list[Node] = []
    for number, node in enumerate(memgraph.nodes):
        task = memgraph.graph.tasks[node.task].name
        deps = set(node.deps)
        if not task.startswith("begin"):
            layer = int(task.split(".")[0])
            deps.update(loads.get(layer, []) if node.kind != RELOAD else runs.get(layer - 1, []))
            (loads if node.kind == RELOAD else runs).setdefault(layer, []).append(number)
        nodes.append(replace(node, deps=tuple(sorted(deps))))
    return replace(memgraph, nodes=tuple(nodes))


@pytest.mark.parametrize("count", [2, 5, 30])
def test_a_planned_stream_of_layers_takes_2n_plus_1_and_level_by_level_3n(count: int) -> None:
    memgraph = layers(count)
    assert [n.kind for n in memgraph.nodes].count(RELOAD) == 2 * count
    assert OFFLOAD not in {n.kind for n in memgraph.nodes}
    assert simulate(memgraph, UNIT).makespan == 2 * count + 1
    assert simulate(levelwise(memgraph), UNIT).makespan == 3 * count
