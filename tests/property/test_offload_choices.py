"""A plan made from what a search chose is that of the search, and none beats its least copies."""

import json
import re
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.any_graphs import graphs
from support.products import examples

import offload
from offload import Costs, GraphBuilder, TaskGraph
from offload.errors import BudgetTooSmall, OffloadError
from offload.graph.taskgraph import Task
from offload.lowering.host_updates import variants
from offload.planning import search
from offload.planning.planner import build_memgraph
from offload.planning.policies import Policy
from offload.planning.refusal import smallest_budget
from offload.planning.search import best_plan
from offload.planning.simulator import least_seconds_with, simulate
from offload.planning.verify import verify
from offload.planning.wanted import UNREAD, FoundPlan, PlanChoice, Wanted, graph_digest, peak_bytes
from offload.sizes import parse_size

COSTS = Costs(flops=1e9, memory=1e9, launch=1e-6, h2d=1e6, d2h=1e6, copy=1e-6)


def searched(graph: TaskGraph, share: float, recompute: bool = True) -> tuple[Wanted, FoundPlan]:
    """The best plan within a share of the room between the least and the most. There is
    no choice where nothing needs to move."""
    least = {d: smallest_budget(graph, d)[0] for d in graph.devices}
    most = {d: peak_bytes(graph, d) for d in graph.devices}
    room = {d: (least[d] + int(share * (most[d] - least[d]))) // 64 * 64 for d in graph.devices}
    others = [("the same once more", replace(graph)), *list(variants(graph, COSTS, "auto"))[1:]]
    wanted = Wanted(graph, room, COSTS, {}, recompute=recompute, others=others)
    return wanted, best_plan(wanted)


@settings(max_examples=examples(60))
@given(graphs(), st.floats(0, 0.99), st.booleans())
def test_a_choice_that_went_through_a_file_makes_the_same_plan(
    graph: TaskGraph, share: float, recompute: bool
) -> None:
    wanted, found = searched(graph, share, recompute)
    if found.choice is None:
        return
    choice = PlanChoice.of_data(json.loads(json.dumps(found.choice.as_data())))
    again = best_plan(wanted, choice)
    assert choice == found.choice and again.known and not found.known
    assert again.tried == found.tried
    for name in ("nodes", "arenas", "starts", "ends", "blocks", "scratch"):
        assert getattr(again.memgraph, name) == getattr(found.memgraph, name)
    assert again.simulation.makespan == found.simulation.makespan


@settings(max_examples=examples(60))
@given(graphs(), st.floats(0, 0.99), st.data())
def test_a_wrong_choice_is_refused_or_makes_a_plan_that_is_proved(
    graph: TaskGraph, share: float, data: st.DataObject
) -> None:
    wanted, found = searched(graph, share)
    if found.choice is None:
        return
    said = found.choice.as_data()
    name = data.draw(st.sampled_from(sorted(said)))
    number = st.integers(-1, len(graph.buffers))
    said[name] = data.draw(st.one_of(number, st.lists(number), st.text(), st.none()))
    try:
        again = best_plan(wanted, PlanChoice.of_data(said))
    except (ValueError, OffloadError):
        return
    verify(again.memgraph)


@settings(max_examples=examples(60))
@given(graphs(), st.data())
def test_a_digest_tells_all_that_a_planner_reads(graph: TaskGraph, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, len(graph.tasks) - 1))
    name = data.draw(st.sampled_from([field.name for field in fields(Task)]))
    before = getattr(graph.tasks[number], name)
    tasks = list(graph.tasks)
    tasks[number] = replace(tasks[number], **{name: changed(before)})
    other = replace(graph, tasks=tuple(tasks))
    assert (graph_digest(other) == graph_digest(graph)) == (name in UNREAD)
    buffers = (replace(graph.buffers[0], nbytes=graph.buffers[0].nbytes + 1), *graph.buffers[1:])
    assert graph_digest(replace(graph, buffers=buffers)) != graph_digest(graph)


def changed(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return f"{value}?"
    return (*value, 0) if isinstance(value, tuple) else 0.5


def test_these_graphs_leave_something_to_choose() -> None:
    builder = GraphBuilder()
    x = builder.buffer("x", 64, "input")
    w = [builder.buffer(f"w{n}", 1 << 20, "parameter") for n in range(6)]
    for n in range(6):
        builder.task(f"f{n}", [x, w[n]], [x], seconds=0.1)
    wanted, found = searched(builder.graph(), 0.5)
    assert found.choice is not None and len(found.tried) > 1
    assert best_plan(wanted, found.choice).memgraph.nodes == found.memgraph.nodes


def said(refused: BudgetTooSmall, before: str) -> str:
    """The size that a refusal says should be given."""
    found = re.search(rf"raise {before} to (\S+?),? ", str(refused))
    assert found is not None, str(refused)
    return found[1]


@settings(max_examples=examples(60), deadline=None)
@given(graphs(), st.floats(0.01, 1), st.sampled_from(("", "B", "KiB", "mib", "GB")))
def test_what_a_refusal_says_should_be_given_is_enough(
    graph: TaskGraph, share: float, unit: str
) -> None:
    least = max(smallest_budget(graph, d)[0] for d in graph.devices)
    sizes = {"": 1, "B": 1, "KiB": 1 << 10, "mib": 1 << 20, "GB": 10**9}
    too_little = max(1, int(least * share) - 1)
    given = f"{too_little / sizes[unit]:.12f}{unit}" if unit else too_little
    try:
        plan = offload.plan(graph, given, COSTS, placement="copy")
    except BudgetTooSmall as refused:
        written = said(refused, "the budget")
        enough = written if unit else int(written)
        assert written.endswith(unit) and refused.needed <= parse_size(enough) * (1 + 1e-9)
        assert parse_size(enough) <= refused.needed * 1.02 + 1
        plan = offload.plan(graph, enough, COSTS, placement="copy")
        with pytest.raises(BudgetTooSmall):
            offload.plan(graph, max(1, refused.needed - 64), COSTS, placement="copy")
    if not plan.host_bytes:
        return
    budget, on_host = plan.budget[0], max(1, int(plan.host_bytes * share * 0.9))
    try:
        offload.plan(graph, budget, COSTS, on_host, placement="copy")
    except BudgetTooSmall as refused:
        assert refused.on_host
        enough = int(said(refused, "host_budget"))
        assert on_host < enough <= max(refused.needed, plan.host_bytes)
        within = offload.plan(graph, budget, COSTS, enough, placement="copy")
        assert within.host_bytes <= enough


SLOW_COPIES = Costs(flops=1e12, memory=1e12, launch=1e-9, h2d=1e6, d2h=3e6, copy=1e-7)
"""Copies take long beside tasks."""


@settings(max_examples=examples(100))
@given(graphs(), st.data())
def test_no_plan_takes_less_than_its_least_copies(graph: TaskGraph, data: st.DataObject) -> None:
    whole = {d: peak_bytes(graph, d) for d in graph.devices}
    room = {d: int(data.draw(st.floats(0.3, 2)) * n) // 64 * 64 for d, n in whole.items()}
    persistent = [b for b, buffer in enumerate(graph.buffers) if buffer.persistent]
    resident = frozenset(b for b in persistent if data.draw(st.booleans()))
    far = data.draw(st.sampled_from((0, 2, 64)))
    policy = Policy(resident, ahead=far, evict_ahead=far // 2, drop_ahead=far)
    try:
        memgraph = build_memgraph(graph, room, policy)
    except BudgetTooSmall:
        return
    least = least_seconds_with(graph, SLOW_COPIES, resident, {})
    assert simulate(memgraph, SLOW_COPIES).makespan >= least * (1 - 1e-9)


def chain(layers: int) -> TaskGraph:
    """Each layer has a weight, which is read and then updated."""
    builder = GraphBuilder()
    made = builder.buffer("x", 64, "input")
    weights = [builder.buffer(f"w{n}", 1 << 16, "parameter") for n in range(layers)]
    for n, w in enumerate(weights):
        before, made = made, builder.buffer(f"a{n}", 64, "activation")
        builder.task(f"f{n}", [before, w], [made], seconds=1e-9)
    for n, w in enumerate(weights):
        builder.task(f"u{n}", [w, made], [w], phase="update", seconds=1e-9)
    builder.output(made)
    return builder.graph()


def test_plans_that_cannot_be_the_best_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = chain(24)
    made = offload.plan(graph, 22 << 16, SLOW_COPIES)
    hopeful = len(made.found.tried)
    monkeypatch.setattr(search, "least_seconds_with", lambda *_: 0.0)
    every = offload.plan(graph, 22 << 16, SLOW_COPIES)
    assert hopeful < len(every.found.tried)
    assert made.predicted_seconds == every.predicted_seconds
    assert made.memgraph.nodes == every.memgraph.nodes
