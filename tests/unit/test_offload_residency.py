"""Which persistent tensors stay on their device: those that would move most, spread evenly."""

import itertools
from dataclasses import replace

from support.graph_edits import grown, with_buffer

from offload.graph.builder import GraphBuilder
from offload.graph.costs import Costs
from offload.graph.taskgraph import HOST, TaskGraph
from offload.planning.residency import SMALL, exposed, most_resident

BIG = 1 << 20


def step(layers: int = 6, nbytes: int = BIG) -> TaskGraph:
    """Forward, backward and update of some layers, each with a weight and a state."""
    builder = GraphBuilder()
    made = builder.buffer("x", 64, "input")
    weights = [builder.buffer(f"w{n}", nbytes, "parameter") for n in range(layers)]
    states = [builder.buffer(f"m{n}", nbytes, "state") for n in range(layers)]
    for n, w in enumerate(weights):
        before, made = made, builder.buffer(f"a{n}", 64, "activation")
        builder.task(f"f{n}", [before, w], [made])
    for n in reversed(range(layers)):
        g = builder.buffer(f"g{n}", nbytes, "gradient")
        builder.task(f"b{n}", [made, weights[n]], [g], phase="backward")
        changed = [weights[n], states[n]]
        builder.task(f"u{n}", [g, *changed], changed, phase="update")
    return builder.graph()


def names(graph: TaskGraph, room: int) -> set[str]:
    return {graph.buffers[b].name for b in most_resident(graph, {0: room})}


def test_everything_stays_where_there_is_room_and_nothing_where_there_is_none() -> None:
    graph = step()
    assert names(graph, 12 * BIG) == {f"{kind}{n}" for kind in "wm" for n in range(6)}
    assert names(graph, 0) == set()
    assert names(graph, -BIG) == set()


def test_what_stays_fits_into_the_room() -> None:
    graph = step()
    for room in range(0, 13 * BIG, BIG // 3):
        assert len(names(graph, room)) * BIG <= room


def test_weights_stay_before_the_optimizers_state() -> None:
    """A weight moves in, in and out; its state in and out."""
    graph = step()
    assert names(graph, 6 * BIG) == {f"w{n}" for n in range(6)}


def test_every_second_weight_stays_where_half_of_them_fit() -> None:
    stays = names(step(8), 4 * BIG)
    assert len(stays) == 4
    numbers = sorted(int(name[1:]) for name in stays)
    assert all(later - number == 2 for number, later in itertools.pairwise(numbers))


def test_what_is_not_worth_a_copy_stays_first() -> None:
    builder = grown(step(4))
    small = builder.buffer("bias", SMALL - 1, "buffer")
    builder.task("use", [small], [])
    assert names(builder.graph(), SMALL) == {"bias"}


def test_the_pieces_of_a_tensor_stay_together() -> None:
    graph = step(2)
    for number, buffer in enumerate(graph.buffers):
        if buffer.name in ("m0", "m1"):
            start = BIG * int(buffer.name == "m1")
            graph = with_buffer(graph, number, tensor="m", start=start)
    for room in range(0, 5 * BIG, BIG // 2):
        assert len(names(graph, room) & {"m0", "m1"}) in (0, 2)


def test_what_a_host_task_works_on_stays_on_the_host() -> None:
    builder = grown(step(2))
    builder.task("there", [2], [2], lane="host")  # w1
    assert names(builder.graph(), 100 * BIG) == {"w0", "m0", "m1"}


def test_only_what_persists_and_has_a_device_is_resident() -> None:
    builder = grown(step(1))
    far = builder.buffer("far", BIG, "state", device=HOST)
    builder.task("there", [far], [far], lane="host", device=HOST)
    builder.buffer("unused", BIG, "constant")
    assert names(builder.graph(), 100 * BIG) == {"w0", "m0"}


def test_every_device_has_a_room_of_its_own() -> None:
    builder = grown(step(2))
    other = builder.buffer("other", BIG, "parameter", device=1)
    builder.task("use", [other], [], device=1)
    graph = builder.graph()
    assert most_resident(graph, {0: 0, 1: BIG}) == {other}
    assert other not in most_resident(graph, {0: 100 * BIG, 1: 0})


# ---- what a step begins with --------------------------------------------------------------------

COSTS = Costs(flops=1.0, launch=0.0, copy=0.0, h2d=float(BIG))
"""A copy of a weight takes a second."""


def working(seconds: float, layers: int = 6) -> TaskGraph:
    graph = step(layers)
    return graph.with_tasks([replace(task, seconds=seconds) for task in graph.tasks])


def begun(graph: TaskGraph, room: int, resident: frozenset[int] = frozenset()) -> list[str]:
    return sorted(graph.buffers[b].name for b in exposed(graph, COSTS, resident, {0: room}))


def test_nothing_hides_the_first_copy_of_what_a_step_begins_with() -> None:
    # Of 0.9 s a task: w1 is needed after 0.9 s and there after 1, w2 after 1.8 s and there after 1.
    assert begun(working(0.9), 6 * BIG) == ["w0", "w1"]
    assert begun(working(2.0), 6 * BIG) == ["w0"]


def test_what_begins_a_step_has_so_much_room_at_the_most() -> None:
    graph = working(0.1)
    assert begun(graph, 6 * BIG) == [f"w{n}" for n in range(6)]
    assert begun(graph, 2 * BIG) == ["w0", "w1"]
    assert begun(graph, BIG - 1) == []


def test_what_stays_anyway_is_not_copied() -> None:
    graph = working(0.9)
    w0 = next(b for b, buffer in enumerate(graph.buffers) if buffer.name == "w0")
    assert begun(graph, 6 * BIG, frozenset({w0})) == ["w1"]


def test_what_a_step_begins_with_stays_before_all_others() -> None:
    graph = step(8)
    last = frozenset(b for b, buffer in enumerate(graph.buffers) if buffer.name == "m0")
    found = most_resident(graph, {0: 3 * BIG}, last)
    assert last < found and len(found) == 3
