"""What a plan moves, and the least memory in which a graph can run."""

from typing import Any

import pytest

import offload
from offload.errors import BudgetTooSmall
from offload.graph.taskgraph import Role, TaskGraph
from offload.plans.plan import Plan


def least(graph: TaskGraph, **options: Any) -> int:
    """The smallest device budget, as the refusal of one byte says it."""
    with pytest.raises(BudgetTooSmall) as refused:
        offload.plan(graph, 1, **options)
    return refused.value.needed


def moved(plan: Plan, kind: str) -> dict[Role, int]:
    """The bytes that nodes of this kind move, by the role of what they move."""
    found: dict[Role, int] = {}
    for node in plan.memgraph.nodes:
        if node.kind == kind:
            role = plan.graph.buffers[node.buffer].role
            found[role] = found.get(role, 0) + node.nbytes
    return found
