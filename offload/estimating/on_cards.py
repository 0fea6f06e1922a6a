"""What a recorded step needs of each card: the same graph, priced and planned card by card.

record(capability, devices) --> graphs --> passes --> a card's prices --> passes --> budgets
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from offload.errors import BudgetTooSmall
from offload.estimating.card import Card, read_card
from offload.estimating.cheap_budgets import (
    CardStep,
    CheapBudget,
    CheapBudgets,
    find_cheap_budgets,
)
from offload.estimating.estimate import CardEstimate
from offload.estimating.pricing import costs_of, price_tasks
from offload.graph.taskgraph import TaskGraph
from offload.live.planned_tapes import group_small_kernels
from offload.lowering.device_placing import place_tasks
from offload.lowering.passes import MERGES, PASSES
from offload.lowering.update_splits import split_updates
from offload.lowering.whole_updates import merge_whole_updates
from offload.plans.explain import find_largest_task
from offload.plans.plan import Plan, plan

SEVERAL = re.compile(r"(\d+)x(.+)")
Record = Callable[[tuple[int, int], int], Sequence[TaskGraph]]
"""Returns the graphs of an update, for a compute capability and a number of devices."""


@dataclass(frozen=True, slots=True)
class CardSet:
    """Equal cards of one machine."""

    card: Card
    count: int = 1

    @property
    def name(self) -> str:
        return self.card.name if self.count == 1 else f"{self.count}x{self.card.name}"


def read_cards(names: Sequence[str]) -> list[CardSet]:
    """Read `rtx4090`, `2xh100` or the path of a card file."""
    sets: list[CardSet] = []
    for name in names:
        several = SEVERAL.fullmatch(name.strip())
        count, name = (int(several[1]), several[2]) if several else (1, name.strip())
        sets.append(CardSet(read_card(name), count))
    return sets


def estimate_cards(sets: Sequence[CardSet], record: Record) -> list[CardEstimate]:
    """Estimate the step that `record` records, on each of these."""
    recorded: dict[tuple[bool, int], list[TaskGraph]] = {}
    priced: list[list[TaskGraph]] = []
    for each in sets:
        capability = _capability_of(each.card)
        key = capability[0] in (9, 10), each.count  # other kernels of attention
        if key not in recorded:
            graphs = record(capability, each.count)
            recorded[key] = [_prepare(graph, each.card) for graph in graphs]
        priced.append([_price(graph, each) for graph in recorded[key]])
    alone = [
        CardStep(graphs[-1], costs_of(each.card), each.card.memory_bytes - each.card.context_bytes)
        for each, graphs in zip(sets, priced, strict=True)
        if each.count == 1
    ]
    found = iter(find_cheap_budgets(alone))
    return [
        _estimate(each, graphs, next(found) if each.count == 1 else _plan_devices(each, graphs[-1]))
        for each, graphs in zip(sets, priced, strict=True)
    ]


def _capability_of(card: Card) -> tuple[int, int]:
    major, _, minor = card.capability.partition(".")
    return int(major), int(minor or 0)


def _prepare(graph: TaskGraph, card: Card) -> TaskGraph:
    """The passes that need no seconds."""
    if card.device == "cuda" and graph.program is not None:
        program = replace(graph.program, device=torch.device("meta"))
        graph = replace(graph, program=program)
    return split_updates(merge_whole_updates(graph))


def _price(graph: TaskGraph, each: CardSet) -> TaskGraph:
    graph = price_tasks(graph, each.card)
    for run_pass in PASSES:
        graph = run_pass(graph)
    graph = place_tasks(graph, each.count, costs_of(each.card))
    for run_pass in (*MERGES, group_small_kernels):
        graph = run_pass(graph)
    return graph


def _estimate(
    each: CardSet, graphs: Sequence[TaskGraph], found: CheapBudgets | None
) -> CardEstimate:
    """The batches before the last one of an update take their seconds, too."""
    card = each.card
    others = sum(task.seconds or 0.0 for graph in graphs[:-1] for task in graph.tasks)
    return CardEstimate(
        each.name,
        card.source,
        card.memory_bytes,
        card.context_bytes,
        found and _add_seconds(found, others),
        card.error,
        each.count,
    )


def _add_seconds(found: CheapBudgets, seconds: float) -> CheapBudgets:
    def add(budget: CheapBudget) -> CheapBudget:
        whole = found.whole.seconds + seconds
        longer = budget.seconds + seconds * budget.factor
        return replace(budget, seconds=longer, factor=longer / whole)

    if not seconds:
        return found
    return replace(
        found,
        whole=add(found.whole),
        cheap=tuple((factor, add(budget)) for factor, budget in found.cheap),
        within=found.within and add(found.within),
    )


def _plan_devices(each: CardSet, graph: TaskGraph) -> CheapBudgets:
    """The step on several devices, without a budget and within the memory of each."""
    costs, capacity = costs_of(each.card), each.card.memory_bytes - each.card.context_bytes
    unlimited = plan(graph, None, costs, optimizer="auto", proven=False)
    whole = _budget_of(unlimited, unlimited)
    smallest, largest, _ = find_largest_task(unlimited)
    within = whole if whole.budget <= capacity else None
    if within is None:
        try:
            made = plan(graph, capacity, costs, optimizer="auto", proven=False)
            within = _budget_of(made, unlimited)
        except BudgetTooSmall as error:
            largest = str(error.task or largest)
    return CheapBudgets(whole, smallest, str(largest), (), within)


def _budget_of(made: Plan, unlimited: Plan) -> CheapBudget:
    seconds = made.predicted_seconds
    factor = seconds / unlimited.predicted_seconds
    return CheapBudget(made.device_bytes, seconds, factor, made.host_bytes)
