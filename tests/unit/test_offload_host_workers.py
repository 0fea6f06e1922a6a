"""Workers of the host do not wait for each other's addresses, and host memory has its limit."""

from dataclasses import replace
from typing import Any

import pytest
from support.hand_made_plans import UNIT

import offload
from offload.errors import BudgetTooSmall
from offload.graph.builder import GraphBuilder
from offload.graph.costs import Costs
from offload.graph.memgraph import MemGraph
from offload.graph.taskgraph import HOST, TaskGraph
from offload.planning.arena import BESIDE, HeldAddresses, Space
from offload.planning.planner import build_memgraph
from offload.planning.policies import Policy
from offload.planning.simulator import simulate
from offload.planning.verify import verify

MIB = 1 << 20
H200 = Costs(
    flops=7.3e14, memory=4.2e12, launch=6.9e-6, h2d=55.2e9, d2h=55e9, shared=0.91, copy=3.8e-6
)
HOST_MEMORY = 124e9
NEVER_AGAIN = 1 << 40
"""So many workers that no address is given out twice."""


def step(layers: int, weights: tuple[int, ...], cast: bool = False, chunks: int = 1) -> TaskGraph:
    """A step whose updates all run on the host. `weights`: MiB of a layer's, in turn. `cast`:
    gradients are half as large, and cast there. `chunks`: tasks of an update, one state each."""
    builder = GraphBuilder()
    x = builder.buffer("x", MIB, "input")
    made: list[tuple[int, int, int]] = []
    for n in range(layers):
        nbytes = weights[n % len(weights)] * MIB
        w = builder.buffer(f"w{n}", nbytes, "parameter")
        y = builder.buffer(f"a{n}", MIB, "activation")
        builder.task(f"f{n}", [x, w], [y], seconds=1e-4 * nbytes / MIB / 16)
        made.append((n, w, x))
        x = y
    for n, w, read in reversed(made):
        nbytes = builder.buffers[w].nbytes
        g = builder.buffer(f"g{n}", nbytes // 2 if cast else nbytes, "gradient")
        took = 2e-4 * nbytes / MIB / 16
        back, x = x, builder.buffer(f"d{n}", MIB, "gradient")
        builder.task(f"b{n}", [back, read, w], [g, x], phase="backward", seconds=took)
        if cast:
            half, g = g, builder.buffer(f"whole{n}", nbytes, "gradient")
            traffic = 3 * nbytes // 2
            builder.task(f"c{n}", [half], [g], phase="backward", lane="host", traffic=traffic)
        for chunk in range(chunks):
            m = builder.buffer(f"m{n}.{chunk}", 2 * nbytes // chunks, "state")
            builder.task(
                f"u{n}.{chunk}", [w, m, g], [w, m], phase="update", lane="host",
                traffic=7 * nbytes // chunks,
            )  # fmt: skip
    builder.output(x)
    return builder.graph()


STEPS: dict[str, dict[str, Any]] = {
    "equal": {"weights": (16,)},
    "cast": {"weights": (16,), "cast": True},
    "mixed": {"weights": (4, 8, 8, 2, 8), "cast": True},
    "chunks": {"weights": (16,), "cast": True, "chunks": 2},
}
MANY, FEW = 120, 40
"""Layers. One of 16 workers takes 16 times as long for an update, so a fair step has many."""


def costs(workers: int) -> Costs:
    """As many workers as are wanted share one memory."""
    return replace(H200, host_memory=HOST_MEMORY / workers, host_workers=workers)


def planned(
    graph: TaskGraph, workers: int, held: int | None = None, limit: int | None = None
) -> MemGraph:
    """A plan in which nothing stays on the device. `held`: the workers that the planner counts."""
    clock, now = [], 0.0
    for task in graph.tasks:
        clock.append(now)
        now += costs(workers).of_task(task)
    capacities = {0: 512 * MIB} | ({} if limit is None else {HOST: limit})
    policy = Policy(host_workers=workers if held is None else held)
    return build_memgraph(graph, capacities, policy, clock)


def seconds(memgraph: MemGraph, workers: int) -> float:
    return simulate(memgraph, costs(workers)).makespan


# ---- no worker waits for another one's address ---------------------------------------------------


@pytest.mark.parametrize("workers", [1, 4, 16])
@pytest.mark.parametrize("name", STEPS)
def test_no_worker_waits_for_an_address(name: str, workers: int) -> None:
    """A step takes as long as if none were given out twice, for a part of the memory."""
    graph = step(FEW, **STEPS[name])
    at_once, held, apart = (planned(graph, workers, n) for n in (0, None, NEVER_AGAIN))
    assert seconds(held, workers) <= 1.03 * seconds(apart, workers)
    more = held.arenas[HOST] - at_once.arenas[HOST]
    gradients = 1.5 * max(STEPS[name]["weights"]) * MIB  # one, and the half that it is cast from
    assert 0 <= more <= (BESIDE * workers + 1) * gradients


def test_plans_hold_back_for_as_many_workers_as_the_machine_has() -> None:
    graph = step(12, (16,))
    for workers in (1, 8):
        plan = offload.plan(graph, 128 * MIB, costs(workers), placement="copy")
        assert plan.found.policy.host_workers == workers


# ---- host memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STEPS)
def test_a_host_limit_holds_and_what_it_allows_is_not_refused(name: str) -> None:
    """From what a plan takes that gives every address out at once, to more than enough."""
    graph = step(FEW, **STEPS[name])
    least, most = (planned(graph, 16, held).arenas[HOST] for held in (0, None))
    assert least < most
    taken: list[float] = []
    for limit in (least, (least + most) // 2 // UNIT * UNIT, most):
        memgraph = planned(graph, 16, limit=limit)
        verify(memgraph)
        assert memgraph.arenas[HOST] <= limit
        taken.append(seconds(memgraph, 16))
    assert taken == sorted(taken, reverse=True), "more memory, fewer waits"
    assert taken[-1] < 0.5 * taken[0]
    with pytest.raises(BudgetTooSmall):
        planned(graph, 16, limit=least // 2)


@pytest.mark.parametrize("workers", [1, 16])
def test_a_refusal_names_the_host_memory_that_does_with_every_address_given_out_at_once(
    workers: int,
) -> None:
    graph = step(12, (16,), cast=True)
    with pytest.raises(BudgetTooSmall) as refused:
        offload.plan(graph, 128 * MIB, costs(workers), "64MiB", placement="copy")
    state_and_weight, half, whole = 12 * 48 * MIB, 8 * MIB, 16 * MIB
    assert refused.value.needed <= state_and_weight + half + whole + 12 * MIB
    plan = offload.plan(graph, 128 * MIB, costs(workers), refused.value.needed, placement="copy")
    assert plan.host_bytes <= refused.value.needed


def test_what_is_due_first_is_free_first_where_there_is_no_other_room() -> None:
    space = Space(192)
    held = HeldAddresses(space, workers=2)
    for offset, took in ((0, 3.0), (64, 1.0), (128, 2.0)):
        space.take(offset, 64, offset)
        held.give(offset, [], took)
    assert [taken(space, held) for _ in range(3)] == [64, 128, 0]
    assert held.best_fit(64) is None


def taken(space: Space, held: HeldAddresses) -> int | None:
    found = held.best_fit(64)
    if found is not None:
        space.take(found, 64, "next")
    return found
