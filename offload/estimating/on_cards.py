"""What a recorded step needs of each card: the same graph, priced and planned card by card.

record(card set) --> graphs --> passes --> a card's prices --> passes --> budgets
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from offload.errors import BudgetTooSmall
from offload.estimating.card import Card, CardError, read_card
from offload.estimating.cheap_budgets import (
    CardStep,
    CheapBudget,
    CheapBudgets,
    find_cheap_budgets,
)
from offload.estimating.estimate import CardEstimate
from offload.estimating.pricing import costs_of, find_unmeasured, price_on_cards
from offload.graph.taskgraph import TaskGraph
from offload.live.planned_tapes import group_small_kernels
from offload.lowering.device_placing import place_tasks
from offload.lowering.passes import MERGES, PASSES
from offload.lowering.update_splits import split_updates
from offload.lowering.whole_updates import merge_whole_updates
from offload.plans.explain import find_largest_task
from offload.plans.plan import Plan, plan

SEVERAL = re.compile(r"(\d+)x(.+)")
LITTLE = 0.01
"""The share of a step's seconds that work of an unmeasured class may take, unsaid."""


@dataclass(frozen=True, slots=True)
class CardSet:
    """Equal cards of one machine."""

    card: Card
    count: int = 1

    @property
    def name(self) -> str:
        return self.card.name if self.count == 1 else f"{self.count}x{self.card.name}"

    @property
    def device(self) -> str:
        """The device of the shadows that a step is recorded with."""
        return "cpu" if self.card.device == "cpu" else "cuda:0"

    @property
    def capability(self) -> tuple[int, int]:
        major, _, minor = self.card.capability.partition(".")
        return int(major or 0), int(minor or 0)


Record = Callable[[CardSet], Sequence[TaskGraph]]
"""Returns the graphs of an update on such cards."""


def read_cards(names: Sequence[str]) -> list[CardSet]:
    """Read `rtx4090`, `2xh100` or the path of a card file."""
    sets: list[CardSet] = []
    for name in names:
        several = SEVERAL.fullmatch(name.strip())
        count, name = (int(several[1]), several[2]) if several else (1, name.strip())
        sets.append(CardSet(read_card(name), count))
    _check_names(sets)
    return sets


def _check_names(sets: Sequence[CardSet]) -> None:
    """Raise `CardError` if two different cards have one name."""
    known = dict[str, Card]()
    for each in sets:
        if known.setdefault(each.name, each.card) != each.card:
            raise CardError(
                f"two different cards are named {each.name}, so nobody could tell them apart:"
                " give one another name, in its file"
            )


def check_price(price: Mapping[str, float], sets: Sequence[CardSet]) -> None:
    """Raise `CardError` if something has a price whose seconds are not known."""
    known = {each.name: each.card for each in sets}
    for name, dollars in price.items():
        if name not in known:
            raise CardError(f"price of {name!r}: the cards asked for are {', '.join(known)}")
        if not known[name].is_measured:
            raise CardError(
                f"price of {name}: its file is of a data sheet, by which a step takes its seconds"
                " at least, so nobody knows what it costs. Measure such a card by perfect-card"
                " measure, and give the file in place of the name"
            )
        if not 0 < dollars < math.inf:
            raise CardError(f"price of {name}: {dollars} is no price of an hour: give one above 0")


def estimate_cards(sets: Sequence[CardSet], record: Record) -> list[CardEstimate]:
    """Estimate the step that `record` records, on each of these."""
    priced: dict[str, list[TaskGraph]] = {}
    for group in _group_by_kernels(sets):
        graphs = record(group[0])
        for_each = [price_step(graph, group) for graph in graphs]
        for number, each in enumerate(group):
            priced[each.name] = [of_cards[number] for of_cards in for_each]
    steps = [_step_on(each, priced[each.name][-1]) for each in sets if each.count == 1]
    found = iter(find_cheap_budgets(steps))
    return [
        _estimate(each, priced[each.name], next(found) if each.count == 1 else None)
        for each in sets
    ]


def _group_by_kernels(sets: Sequence[CardSet]) -> list[list[CardSet]]:
    """Those for which a step is recorded once: their attention runs by the same kernels."""
    groups: dict[tuple[str, bool, int], list[CardSet]] = {}
    for each in sets:
        key = each.device, each.capability[0] in (9, 10), each.count
        groups.setdefault(key, []).append(each)
    return [*groups.values()]


def _step_on(each: CardSet, graph: TaskGraph) -> CardStep:
    card = each.card
    return CardStep(graph, costs_of(card), card.memory_bytes - card.context_bytes)


def _prepare(graph: TaskGraph, card: Card) -> TaskGraph:
    """The passes that need no seconds."""
    if card.device == "cuda" and graph.program is not None:
        program = replace(graph.program, device=torch.device("meta"))
        graph = replace(graph, program=program)
    return split_updates(merge_whole_updates(graph))


def price_step(graph: TaskGraph, group: Sequence[CardSet]) -> list[TaskGraph]:
    """A recorded step with the seconds of each of these cards, for which it was recorded."""
    graph = _prepare(graph, group[0].card)
    for run_pass in PASSES:
        graph = run_pass(graph)
    cards = [each.card for each in group]
    if group[0].count == 1:
        return price_on_cards(_merge(graph), cards)
    return [
        _merge(place_tasks(priced, group[0].count, costs_of(card)))
        for priced, card in zip(price_on_cards(graph, cards), cards, strict=True)
    ]


def _merge(graph: TaskGraph) -> TaskGraph:
    for run_pass in (*MERGES, group_small_kernels):
        graph = run_pass(graph)
    return graph


def _estimate(
    each: CardSet, graphs: Sequence[TaskGraph], found: CheapBudgets | None
) -> CardEstimate:
    """The batches before the last one of an update take their seconds, too."""
    card = each.card
    others = sum(task.seconds or 0.0 for graph in graphs[:-1] for task in graph.tasks)
    found = found or _plan_devices(each, graphs[-1])
    memory = card.memory_bytes, card.context_bytes
    found = _add_seconds(found, others)
    unknown = find_unmeasured(graphs[-1], card) if card.is_measured else {}
    missing = tuple(kind for kind, share in unknown.items() if share > LITTLE)
    error = None if missing else card.error
    return CardEstimate(each.name, card.source, *memory, found, error, missing, each.count)


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
