"""The planner looks far enough ahead where the pieces of several micro-batches take turns."""

import random
from itertools import product
from typing import Any

from offload import Costs, GraphBuilder, TaskGraph
from offload.planning.planner import build_memgraph
from offload.planning.policies import FURTHER, Policy
from offload.planning.refusal import smallest_budget
from offload.planning.search import best_plan
from offload.planning.wanted import Wanted

KIB = 1024
LAYERS, MICRO_BATCHES, PIECES = 4, 8, 3


def taking_turns(dice: random.Random) -> TaskGraph:
    """Each layer computes all micro-batches, three pieces of each, before the next weight is
    needed. Gradients are added up."""
    builder = GraphBuilder()
    weights = [
        builder.buffer(f"w{n}", dice.choice((64, 96, 160)) * KIB, "parameter")
        for n in range(LAYERS)
    ]
    sums = [
        builder.buffer(f"g{n}", builder.buffers[weight].nbytes, "state")
        for n, weight in enumerate(weights)
    ]
    kept = [[builder.buffer(f"x{m}", 16 * KIB, "input")] for m in range(MICRO_BATCHES)]

    def task(name: str, reads: list[int], writes: list[int], **more: Any) -> None:
        traffic = 4 * sum(builder.buffers[b].nbytes for b in {*reads, *writes})
        builder.task(name, reads, writes, traffic=traffic, **more)

    for n, weight in enumerate(weights):
        for m, own in enumerate(kept):
            for piece in range(PIECES):
                name = f"{n}.{m}.{piece}"
                made = builder.buffer(f"a{name}", dice.choice((8, 16, 32)) * KIB, "activation")
                task(f"f{name}", [weight, own[-1]], [made], phase="forward")
                own.append(made)
    for n in reversed(range(LAYERS)):
        for m, own in enumerate(kept):
            for piece in reversed(range(PIECES)):
                reads = [weights[n], sums[n], own.pop()]
                task(f"b{n}.{m}.{piece}", reads, [sums[n]], phase="backward")
    return builder.graph()


def test_a_plan_that_looks_further_ahead_is_found_where_it_is_the_fastest() -> None:
    graph = taking_turns(random.Random(21))
    budget = 2 * smallest_budget(graph, 0)[0]
    policy = best_plan(Wanted(graph, {0: budget}, Costs(), {}, recompute=False)).policy
    assert (policy.ahead, policy.evict_ahead, policy.drop_ahead) in FURTHER


def test_policies_that_look_beyond_the_last_task_make_the_same_plan() -> None:
    graph = taking_turns(random.Random(21))
    count, budget = len(graph.tasks), 2 * smallest_budget(graph, 0)[0]
    policies = [Policy(frozenset(), *one) for one in product((0, 16, 500), (0, 4, 300), (0, 400))]
    plans: dict[Any, Any] = {}
    for policy in policies:
        nodes = build_memgraph(graph, {0: budget}, policy).nodes
        assert plans.setdefault(policy.key_for(count), nodes) == nodes
    assert len(plans) < len(policies)
