"""Every kind of fault in a MemGraph made by hand is found, and the right pair is named.

node      0    1    2    3    4    5    6    7    8    9
          R x  R w  f    O a  g    R a  u    O w  h    O y      x input, w parameter, y output
[0,64)         w................................................
[64,128)  x................      a.........      y.........
[128,192)           a.......  b.......................
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.graph_edits import with_buffer, with_task

from offload.errors import RaceFound
from offload.graph.builder import GraphBuilder
from offload.graph.memgraph import OFFLOAD, RELOAD, TASK, Access, MemGraph, Node, Place
from offload.graph.taskgraph import HOST, Buffer, Role, Task, TaskGraph
from offload.planning.verify import verify

X, W, A, B, Y = range(5)
FROM_START, AT_END = "the start of the step", "the end of the step"
AT = {"x": 0, "w": 64, "a": 128, "y": 192}  # in the host arena


def touch(offset: int, buffer: int | None, how: str, nbytes: int = 64, arena: int = 0) -> Access:
    return Access(Place(arena, offset, nbytes), buffer, "r" in how, "w" in how)


def run(task: int, deps: tuple[int, ...], *accesses: Access, lane: str = "compute") -> Node:
    return Node(TASK, lane, accesses, deps, task)


def copy(
    kind: str, buffer: int, host: int, offset: int, deps: tuple[int, ...] = (), nbytes: int = 64
) -> Node:
    there = Place(HOST, host, nbytes)
    here = Place(0, offset, nbytes)
    source, target = (there, here) if kind == RELOAD else (here, there)
    accesses = (Access(source, buffer, True, False), Access(target, buffer, False, True))
    lane = "h2d" if kind == RELOAD else "d2h"
    return Node(kind, lane, accesses, deps, 0, buffer, nbytes)


def example() -> MemGraph:
    builder = GraphBuilder()
    for name, role in (("x", "input"), ("w", "parameter"), ("a", "activation")):
        builder.buffer(name, 64, role)
    builder.buffer("b", 64)
    builder.output(builder.buffer("y", 64))
    builder.task("f", [X, W], [A])
    builder.task("g", [X], [B])
    builder.task("u", [W, A], [W])
    builder.task("h", [W, B], [Y])
    graph = builder.graph()
    nodes = (
        copy(RELOAD, X, AT["x"], 64),
        copy(RELOAD, W, AT["w"], 0),
        run(0, (0, 1), touch(64, X, "r"), touch(0, W, "r"), touch(128, A, "w")),
        copy(OFFLOAD, A, AT["a"], 128, (2,)),
        run(1, (3,), touch(64, X, "r"), touch(128, B, "w")),
        copy(RELOAD, A, AT["a"], 64, (4,)),
        run(2, (5,), touch(0, W, "rw"), touch(64, A, "r")),
        copy(OFFLOAD, W, AT["w"], 0, (6,)),
        run(3, (6,), touch(0, W, "r"), touch(128, B, "r"), touch(64, Y, "w")),
        copy(OFFLOAD, Y, AT["y"], 64, (8,)),
    )
    home = {X: Place(HOST, AT["x"], 64), W: Place(HOST, AT["w"], 64)}
    ends = {Y: Place(HOST, AT["y"], 64)}
    return MemGraph(graph, nodes, {0: 192, HOST: 256}, home, ends, (), {})


def changed(memgraph: MemGraph, number: int, **fields: object) -> MemGraph:
    nodes = list(memgraph.nodes)
    nodes[number] = replace(nodes[number], **fields)
    return replace(memgraph, nodes=tuple(nodes))


def moved(memgraph: MemGraph, number: int, access: int, **fields: object) -> MemGraph:
    """With another place for one access of a node."""
    accesses = list(memgraph.nodes[number].accesses)
    accesses[access] = replace(accesses[access], place=replace(accesses[access].place, **fields))
    return changed(memgraph, number, accesses=tuple(accesses))


def without(memgraph: MemGraph, number: int) -> MemGraph:
    """Without a node; whoever waited for it waits for what it waited for."""
    gone = memgraph.nodes[number].deps

    def renumbered(deps: tuple[int, ...]) -> tuple[int, ...]:
        kept = {d for dep in deps for d in (gone if dep == number else (dep,))}
        return tuple(sorted(d - (d > number) for d in kept))

    rest = (node for n, node in enumerate(memgraph.nodes) if n != number)
    return replace(memgraph, nodes=tuple(replace(n, deps=renumbered(n.deps)) for n in rest))


def found(memgraph: MemGraph) -> RaceFound:
    with pytest.raises(RaceFound) as caught:
        verify(memgraph)
    return caught.value


def two_tasks(first: tuple[Access, ...], second: tuple[Access, ...], *sizes: int) -> MemGraph:
    """`one` and `two`, which make what they touch and which nothing orders."""
    builder = GraphBuilder()
    for n, nbytes in enumerate(sizes):
        builder.buffer(f"b{n}", nbytes)
    nodes = []
    for number, (name, accesses) in enumerate((("one", first), ("two", second))):
        reads = [a.buffer for a in accesses if a.reads and a.buffer is not None]
        writes = [a.buffer for a in accesses if a.writes and a.buffer is not None]
        builder.task(name, reads, writes)
        nodes.append(run(number, (), *accesses))
    return MemGraph(builder.graph(), tuple(nodes), {0: 1024}, {}, {}, (), {})


# Sound ones


def test_a_sound_plan_passes() -> None:
    verify(example())


# Races


def test_a_read_that_does_not_wait_for_the_copy_it_needs_is_found() -> None:
    error = found(changed(example(), 2, deps=(0,)))
    assert (error.task_a, error.task_b, error.bytes) == ("reload w", "f", (0, 0, 64))
    assert str(error) == (
        "nothing orders reload w (writes) and f (reads) on bytes [0, 64) of device 0"
    )


def test_a_write_that_waits_for_one_of_two_readers_is_found() -> None:
    buffers = Buffer("w", 64, Role.PARAMETER), Buffer("a", 64), Buffer("b", 64)
    tasks = Task("f", (0,), (1,)), Task("g", (0,), (2,)), Task("u", (), (0,))
    nodes = (
        run(0, (), touch(0, 0, "r"), touch(64, 1, "w")),
        run(1, (), touch(0, 0, "r"), touch(128, 2, "w")),
        run(2, (1,), touch(0, 0, "w")),
    )
    home = {0: Place(0, 0, 64)}
    memgraph = MemGraph(TaskGraph(buffers, tasks), nodes, {0: 192}, home, {}, (), {})
    verify(changed(memgraph, 2, deps=(0, 1)))
    assert found(memgraph).task_a == "f"


def test_a_task_that_writes_over_what_it_reads_is_found() -> None:
    error = found(moved(example(), 2, 2, offset=64))
    assert (error.task_a, error.task_b, error.bytes) == ("f", "f", (0, 64, 128))


def test_tasks_that_draw_in_turn_need_a_path() -> None:
    sound = two_tasks((touch(0, 0, "w"),), (touch(64, 1, "w"),), 64, 64)
    sound = replace(sound, graph=with_task(sound.graph, 1, after=(0,)))
    error = found(sound)
    assert (error.task_a, error.task_b) == ("one", "two")
    assert "run after it" in str(error)
    verify(changed(sound, 1, deps=(0,)))
    turned = (sound.nodes[1], replace(sound.nodes[0], deps=(0,)))
    error = found(replace(sound, nodes=turned))
    assert (error.task_a, error.task_b) == ("one", "two")


def test_a_cycle_is_found() -> None:
    for dep in (6, 4):
        error = found(changed(example(), 4, deps=(3, dep)))
        assert (error.task_a, error.task_b) == (example().name(dep), "g")
        assert "cycle" in str(error)
    assert "no node, node -1" in str(found(changed(example(), 4, deps=(-1,))))


# Values


def test_a_stale_reload_after_the_device_copy_changed_is_found() -> None:
    sound = example()
    nodes = list(sound.nodes)
    nodes[7] = copy(RELOAD, W, AT["w"], 192, (6,))
    nodes[8] = run(3, (7,), touch(192, W, "r"), touch(128, B, "r"), touch(64, Y, "w"))
    error = found(replace(sound, nodes=tuple(nodes), arenas={0: 256, HOST: 256}))
    assert (error.task_a, error.task_b, error.bytes) == ("reload w", "h", (0, 192, 256))
    assert str(error) == (
        "h finds on bytes [192, 256) of device 0 w as it was at the start, put there by reload w: "
        "expected w as u wrote it"
    )


def test_a_changed_parameter_that_is_dropped_is_found() -> None:
    error = found(without(example(), 7))
    assert (error.task_a, error.task_b, error.bytes) == (FROM_START, AT_END, (HOST, 64, 128))
    assert "expected w as u wrote it" in str(error)


def test_an_output_in_another_place_or_in_none_is_found() -> None:
    error = found(replace(example(), ends={Y: Place(HOST, AT["a"], 64)}))
    assert (error.task_a, error.task_b) == ("offload a", AT_END)
    assert "no place in `ends`" in str(found(replace(example(), ends={})))


def test_a_read_of_the_right_bytes_at_the_wrong_offset_is_found() -> None:
    buffers = Buffer("b", 128, Role.PARAMETER), Buffer("c", 64)
    graph = TaskGraph(buffers, (Task("f", (0,), (1,)),))
    nodes = (run(0, (), touch(64, 0, "r", 128), touch(192, 1, "w")),)
    error = found(MemGraph(graph, nodes, {0: 256}, {0: Place(0, 0, 128)}, {}, (), {}))
    assert (error.task_b, error.bytes) == ("f", (0, 64, 128))
    assert "b as it was at the start at another offset" in str(error)


def test_two_things_in_one_place_at_the_start_are_found() -> None:
    home = {X: Place(HOST, 0, 64), W: Place(HOST, 0, 64)}
    assert found(replace(example(), starts=home)).bytes == (HOST, 0, 64)


def test_a_changed_parameter_without_a_home_is_found() -> None:
    # Made anew by its first task, so that nobody misses it.
    memgraph = two_tasks((touch(0, 0, "w"),), (touch(64, 1, "w"),), 64, 64)
    memgraph = replace(memgraph, graph=with_buffer(memgraph.graph, 0, role=Role.PARAMETER))
    assert "no place in `starts`" in str(found(memgraph))


# Malformed


def rewritten(number: int, access: int, how: str) -> Callable[[MemGraph], MemGraph]:
    def change(memgraph: MemGraph) -> MemGraph:
        accesses = list(memgraph.nodes[number].accesses)
        accesses[access] = replace(accesses[access], reads="r" in how, writes="w" in how)
        return changed(memgraph, number, accesses=tuple(accesses))

    return change


def cut_short(memgraph: MemGraph, number: int, more: tuple[Access, ...] = ()) -> MemGraph:
    accesses = (*memgraph.nodes[number].accesses[:-1], *more)
    return changed(memgraph, number, accesses=accesses)


def with_workspace(memgraph: MemGraph, scratch: int) -> MemGraph:
    graph = with_task(memgraph.graph, 0, workspace=32)
    return replace(
        memgraph,
        graph=graph,
        arenas={0: 256, HOST: 256},
        scratch={0: Place(0, 192, scratch)},
    )


@pytest.mark.parametrize(
    ("fault", "who", "says"),
    [
        (lambda m: replace(m, arenas={0: 191, HOST: 256}), "f", "the arena has 191 bytes"),
        (lambda m: replace(m, arenas={0: 192}), "x", "the arena has 0 bytes"),
        (lambda m: moved(m, 2, 2, offset=-64), "f", "the arena has 192 bytes"),
        (lambda m: moved(m, 4, 1, offset=120), "g", "120 is not a multiple of 64"),
        (lambda m: moved(m, 4, 1, nbytes=32), "g", "writes 32 bytes of b on device 0: expected"),
        (lambda m: moved(m, 4, 1, arena=HOST), "g", "writes 64 bytes of b on the host: expected"),
        (rewritten(2, 1, "rw"), "f", "reads and writes 64 bytes of w"),
        (rewritten(6, 0, "r"), "u", "reads 64 bytes of w"),
        (rewritten(6, 0, ""), "u", "does nothing to 64 bytes of w"),
        (rewritten(3, 1, "rw"), "offload a", "reads and writes 64 bytes of a on the host"),
        (lambda m: cut_short(m, 2), "f", "it touches no more: expected that it writes 64 bytes"),
        (
            lambda m: changed(m, 4, accesses=(*m.nodes[4].accesses, touch(0, W, "r"))),
            "g",
            "it reads 64 bytes of w on device 0: expected",
        ),
        (lambda m: cut_short(m, 3), "offload a", "it touches no more"),
        (lambda m: changed(m, 3, nbytes=32), "offload a", "moves 32 bytes, but expected are 64"),
        (lambda m: changed(m, 3, lane="h2d"), "offload a", "lane h2d, but belongs on d2h"),
        (lambda m: changed(m, 4, lane="host"), "g", "lane host, but belongs on compute"),
        (lambda m: changed(m, 3, kind="swap"), "node 3", "swap"),
        (lambda m: changed(m, 3, buffer=5), "node 3", "offload 5 is not one of 5"),
        (lambda m: changed(m, 4, task=4), "node 4", "task 4 is not one of 4"),
        (lambda m: changed(m, 4, task=0), "f", "nodes 2 and 4 both run it"),
        (lambda m: replace(m, nodes=m.nodes[:8]), "h", "no node runs it"),
        (lambda m: replace(m, ends={Y: Place(HOST, 192, 32)}), "y", "it has 64 bytes"),
        (lambda m: replace(m, ends={Y: Place(1, 0, 64)}), "y", "the arena has 0 bytes"),
        (lambda m: with_workspace(m, 16), "f", "touches no more: expected that it writes 32"),
        (lambda m: moved(with_workspace(m, 32), 2, 2, offset=192), "f", "overlaps the scratch"),
        (lambda m: replace(m, scratch={0: Place(0, 192, 64)}), "scratch", "192 bytes"),
        (lambda m: replace(m, scratch={0: Place(HOST, 0, 64)}), "scratch", "is on the host"),
    ],
)
def test_what_does_not_fit_the_step_is_found(
    fault: Callable[[MemGraph], MemGraph], who: str, says: str
) -> None:
    error = found(fault(example()))
    assert error.task_b == who or error.task_a == who
    assert says in str(error)


def test_small_workspaces_share_the_scratch() -> None:
    verify(with_workspace(example(), 32))
