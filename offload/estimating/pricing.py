"""Prices the tasks of a graph by a card's rates: nothing is run.

    signature of a call -> Work -> gap + max(operations / rate, bytes / rate), workspace

Equal calls are priced once. A sheet's rates are the vendor's peaks, so its seconds are the least.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from offload.estimating.card import Card
from offload.estimating.operator_class import Work, work_of
from offload.graph.costs import Costs
from offload.graph.taskgraph import Task, TaskGraph
from offload.measuring.distinct_calls import signature
from offload.program.kernels import Call, Calls


@dataclass(frozen=True, slots=True)
class Price:
    """What one call costs on a card."""

    seconds: float
    flops: float
    nbytes: int
    workspace: int


def price_tasks(graph: TaskGraph, card: Card, tf32: bool = False) -> TaskGraph:
    """The graph with the seconds, operations, bytes and workspace of every task.

    `tf32`: whether float32 products may round to TF32, as the program allows. Tasks of the host
    keep what they have: `costs_of` has the rate of its updates."""
    return price_on_cards(graph, [card], tf32)[0]


def price_on_cards(graph: TaskGraph, cards: Sequence[Card], tf32: bool = False) -> list[TaskGraph]:
    """The graph priced by each of these cards. What its calls do is found out once."""
    known: dict[Any, Work] = {}

    def find_work(call: Call) -> Work:
        key = signature(call, graph.alignment)
        if key not in known:
            known[key] = work_of(call)
        return known[key]

    works = [
        [find_work(call) for call in task.kernel.calls]
        if isinstance(task.kernel, Call | Calls) and task.lane != "host"
        else []
        for task in graph.tasks
    ]
    return [_price(graph, works, card, tf32) for card in cards]


def _price(graph: TaskGraph, works: Sequence[Sequence[Work]], card: Card, tf32: bool) -> TaskGraph:
    known = {work: price_work(work, card, tf32) for work in {w for some in works for w in some}}
    tasks = [
        _add_prices(graph, task, [known[work] for work in some]) if some else task
        for task, some in zip(graph.tasks, works, strict=True)
    ]
    program = graph.program
    if program is not None:
        program = replace(program, fixed=card.workspaces.fixed)
    return replace(graph.with_tasks(tasks), program=program)


def find_unmeasured(graph: TaskGraph, card: Card) -> dict[str, float]:
    """By class of work that the card's file has no rate of: its share of the step's seconds."""
    seconds: dict[str, float] = {}
    calls = [call for task in graph.tasks for call in getattr(task.kernel, "calls", ())]
    for work in map(work_of, calls):
        seconds[work.kind] = seconds.get(work.kind, 0.0) + seconds_of(work, card)
    measured = {*card.flops_shares, *card.bytes_shares}
    whole = sum(seconds.values()) or 1.0
    return {kind: taken / whole for kind, taken in seconds.items() if kind not in measured}


def price_work(work: Work, card: Card, tf32: bool = False) -> Price:
    """Price what one call does."""
    workspace = int(card.workspaces.shares.get(work.kind, 0.0) * work.copied)
    return Price(seconds_of(work, card, tf32), work.flops, work.nbytes, workspace)


def seconds_of(work: Work, card: Card, tf32: bool = False) -> float:
    """Seconds of a call: the longer of computing and moving, after a gap."""
    computing = 0.0
    if work.flops:
        computing = work.flops / card.flops_of(work.kind, work.dtype, work.flops, tf32)
    moving = card.moved_of(work.nbytes) / card.bytes_of(work.kind, work.nbytes)
    return card.launch_seconds + max(computing, moving)


def costs_of(card: Card) -> Costs:
    """The rates by which a plan reckons copies, updates on the host, and tasks without a price."""
    return Costs(
        flops=max(card.products.values()),
        memory=card.memory_rate,
        launch=card.launch_seconds,
        h2d=card.links.h2d,
        d2h=card.links.d2h,
        shared=card.links.shared,
        d2d=card.links.d2d,
        copy=card.links.copy_seconds,
        host_memory=card.host.memory_rate,
        host_workers=card.host.workers,
    )


def _add_prices(graph: TaskGraph, task: Task, prices: Sequence[Price]) -> Task:
    own = max(price.workspace for price in prices)
    inner = max((at.stop for at in getattr(task.kernel, "inner", {}).values()), default=0)
    return replace(
        task,
        seconds=sum(price.seconds for price in prices),
        flops=sum(price.flops for price in prices),
        traffic=sum(price.nbytes for price in prices),
        workspace=inner + (graph.align(own) if own else 0),
    )
