"""Any graph, planned into little memory, proved, run in any legal order: a plain run's bits.

The same holds for a runner that moves to other plans and other stages.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.any_graphs import bound, expected, graphs
from support.products import examples

import offload
from offload.errors import BudgetTooSmall, RaceFound
from offload.graph.taskgraph import TaskGraph
from offload.memory.shifts import ASIDE, BACK, CREEPING, STRAIGHT, Shift, in_order
from offload.planning.planner import Policy, build_memgraph
from offload.planning.refusal import smallest_budget
from offload.planning.residency import Residency
from offload.running.runner import Runner
from offload.running.stage import Stage

law = settings(max_examples=examples(120), deadline=None)


@law
@given(
    graph=graphs(),
    spare=st.sampled_from([0, 64, 192, 700, 5000]),
    engine=st.sampled_from(["serial", "threads"]),
    order=st.sampled_from(["priority", "random"]),
    seed=st.integers(0, 99),
)
def test_every_order_of_a_plan_gives_the_bits_of_the_plain_run(
    graph: TaskGraph, spare: int, engine: str, order: str, seed: int
) -> None:
    step = bound(graph)
    graph = step.graph
    final, returned = expected(step, 2)
    budget = {d: max(64, smallest_budget(graph, d)[0] + spare // 64 * 64) for d in graph.devices}
    plan = offload.plan(graph, budget, placement="copy")
    plan.verify()
    assert all(plan.memgraph.arenas[device] <= budget[device] for device in budget)
    with offload.Runner(plan, engine, order, seed, poison=True) as runner:
        for outputs in returned:
            for got, right in zip(runner(*step.batch), outputs, strict=True):
                assert torch.equal(got, right)
    for name, tensor in step.tensors.items():
        assert torch.equal(tensor, final[name])


@settings(max_examples=examples(300), deadline=None)
@given(
    graph=graphs(),
    spare=st.sampled_from([0, 64, 192, 700, 5000, 100_000]),
    share=st.sampled_from([0.0, 0.5, 1.0]),
    ahead=st.sampled_from([0, 1, 3, 20]),
    evict_ahead=st.sampled_from([0, 1, 3]),
    drop_ahead=st.sampled_from([0, 2, 20]),
    workers=st.sampled_from([0, 1, 16]),
)
def test_every_policy_gives_a_plan_that_the_oracle_proves(
    graph: TaskGraph,
    spare: int,
    share: float,
    ahead: int,
    evict_ahead: int,
    drop_ahead: int,
    workers: int,
) -> None:
    least = {device: smallest_budget(graph, device)[0] for device in graph.devices}
    budget = {device: (nbytes + spare) // 64 * 64 for device, nbytes in least.items()}
    room = {device: int((budget[device] - least[device]) * share) for device in least}
    policy = Policy(Residency(graph).choose(room), ahead, evict_ahead, drop_ahead, workers)
    memgraph = build_memgraph(graph, budget, policy)
    offload.verify(memgraph)
    assert all(memgraph.arenas[device] <= budget[device] for device in budget)


@law
@given(graph=graphs(), edge=st.integers(0, 10_000))
def test_every_edge_of_a_plan_is_needed(graph: TaskGraph, edge: int) -> None:
    """A plan's edges are reduced: none is implied by others, so each one's absence is a race."""
    memgraph = offload.plan(graph, dict(least_budgets(graph)), placement="copy").memgraph
    edges = [(n, d) for n, node in enumerate(memgraph.nodes) for d in node.deps]
    if not edges:
        return
    node, dep = edges[edge % len(edges)]
    nodes = list(memgraph.nodes)
    left = tuple(d for d in nodes[node].deps if d != dep)
    nodes[node] = replace(nodes[node], deps=left)
    with pytest.raises(RaceFound) as found:
        offload.verify(replace(memgraph, nodes=tuple(nodes)))
    assert {found.value.task_a, found.value.task_b} & {memgraph.name(node), memgraph.name(dep)}


def least_budgets(graph: TaskGraph) -> list[tuple[int, int]]:
    return [(d, max(64, smallest_budget(graph, d)[0])) for d in graph.devices]


@law
@given(graph=graphs())
def test_a_refused_budget_names_the_smallest_one_that_would_do(graph: TaskGraph) -> None:
    for device in graph.devices:
        others = dict.fromkeys(graph.devices, "1MiB")
        try:
            offload.plan(graph, {**others, device: 1}, placement="copy")
        except BudgetTooSmall as refused:
            assert refused.task in {task.name for task in graph.tasks}
            needed = refused.needed
            offload.plan(graph, {**others, device: needed}, placement="copy").verify()
            with pytest.raises(BudgetTooSmall):
                offload.plan(graph, {**others, device: needed - 1}, placement="copy")


PARTS = (0.0, 0.1, 0.3, 0.6, 1.0)
"""Of the way from the smallest budget to the one without offloading."""


@st.composite
def shifts(draw: st.DrawFn) -> list[Shift]:
    """Lengths, laid out twice in the same memory: in two orders, with gaps of two kinds."""
    lengths = draw(st.lists(st.integers(1, 6), max_size=7))
    creeps = draw(st.booleans())
    starts: list[list[int]] = []
    for _ in range(2):
        at, found = draw(st.integers(0, 8)), [0] * len(lengths)
        for number in draw(st.permutations(range(len(lengths)))):
            found[number] = at
            at += lengths[number] + draw(st.integers(0, 4))
        starts.append(found)
    return [Shift(a, b, n, creeps) for a, b, n in zip(*starts, lengths, strict=True)]


@settings(max_examples=examples(400), deadline=None)
@given(found=shifts())
def test_shifts_in_order_lose_no_byte(found: list[Shift]) -> None:
    memory = [("free", 0)] * 100
    for number, shift in enumerate(found):
        memory[shift.source : shift.source + shift.nbytes] = [
            (str(number), n) for n in range(shift.nbytes)
        ]
    kept: dict[int, list[tuple[str, int]]] = {}
    copied = 0
    for step in in_order(found):
        shift = found[step.number]
        bytes_ = memory[shift.source : shift.source + shift.nbytes]
        if step.how == ASIDE:
            kept[step.number] = bytes_
            copied += shift.nbytes
            continue
        if step.how == STRAIGHT:
            assert not shift.overlaps_itself
        elif step.how == CREEPING:
            assert shift.creeps
        taken = kept.pop(step.number) if step.how == BACK else bytes_
        memory[shift.target : shift.target + shift.nbytes] = taken
    assert kept == {}
    for number, shift in enumerate(found):
        assert memory[shift.target : shift.target + shift.nbytes] == [
            (str(number), n) for n in range(shift.nbytes)
        ]
    assert copied <= sum(shift.nbytes for shift in found)


@settings(max_examples=examples(60), deadline=None)
@given(
    graph=graphs(),
    moves=st.lists(st.tuples(st.sampled_from(PARTS), st.integers(0, 2), st.booleans()), max_size=6),
    engine=st.sampled_from(["serial", "threads"]),
)
def test_any_moves_between_plans_and_stages_keep_the_bits(
    graph: Any, moves: list[tuple[float, int, bool]], engine: str
) -> None:
    """Stage 0 is the runner's first one; the others are those of other devices."""
    step = bound(graph)
    graph = step.graph
    final, returned = expected(step, 1 + len(moves))
    with (
        Stage(engine=engine) as first,
        Stage(engine=engine) as second,
        Stage(engine=engine) as third,
        Runner(planned(graph, 0.3), stage=first, poison=True) as runner,
    ):
        check(runner, step, returned[0])
        for (part, stage, parks), outputs in zip(moves, returned[1:], strict=True):
            if parks:
                runner.park()
            runner.move_to(planned(graph, part), stage=(first, second, third)[stage])
            assert runner.stage is (first, second, third)[stage]
            check(runner, step, outputs)
    for name, tensor in step.tensors.items():
        assert torch.equal(tensor, final[name])


def planned(graph: Any, part: float) -> offload.Plan:
    least = {device: max(64, smallest_budget(graph, device)[0]) for device in graph.devices}
    whole = offload.plan(graph, placement="copy").memgraph.arenas
    more = {d: max(0, whole.get(d, 0) - nbytes) for d, nbytes in least.items()}
    budget = {d: nbytes + int(part * more[d]) // 64 * 64 for d, nbytes in least.items()}
    return offload.plan(graph, budget, placement="copy")


def check(runner: Runner, step: Any, outputs: list[torch.Tensor]) -> None:
    for got, right in zip(runner(*step.batch), outputs, strict=True):
        assert torch.equal(got, right)
