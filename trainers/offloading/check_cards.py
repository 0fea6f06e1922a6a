"""What an update of a module needs of cards that need not be here, and how long it takes there."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from statistics import median
from typing import Any

import lightning as L
import torch

from offload import TaskGraph
from offload.estimating.estimate import Asked, Estimate, LoaderSeconds
from offload.estimating.on_cards import CardSet, check_price, estimate_cards, read_cards
from offload.sizes import parse_size
from trainers.offloading.shadow_fit import record_update

BATCHES, ENOUGH = 9, 5.0
"""So many batches of a loader are timed, or as many as take so many seconds."""


def check_cards(
    module: L.LightningModule,
    loader: Iterable[Any],
    cards: Sequence[str],
    asked: Asked,
    micro_batches: int = 1,
    budget: str | int | None = None,
    **trainer: Any,
) -> Estimate:
    """`trainer`: arguments of `L.Trainer` that change a step, such as `precision`."""
    sets = [_within(each, budget) for each in read_cards(cards)]
    check_price(asked.price, sets)

    def record(each: CardSet) -> Sequence[TaskGraph]:
        options = {"devices": each.count, "micro_batches": micro_batches}
        return record_update(module, loader, each.device, each.capability, options, **trainer)

    return Estimate(
        describe_step(module, trainer),
        estimate_cards(sets, record),
        asked,
        time_loader(loader, trainer.get("accumulate_grad_batches", 1)),
        list_remarks(sets),
    )


def _within(each: CardSet, budget: str | int | None) -> CardSet:
    """The same cards with no more memory than a budget."""
    if budget is None:
        return each
    most = min(each.card.memory_bytes, parse_size(budget) + each.card.context_bytes)
    return replace(each, card=each.card.model_copy(update={"memory_bytes": most}))


def describe_step(module: L.LightningModule, trainer: Mapping[str, Any]) -> str:
    numbers = sum(parameter.numel() for parameter in module.parameters())
    precision = trainer.get("precision") or "32-true"
    return f"{type(module).__name__}: {numbers / 1e6:,.1f} M weights, {precision}"


def list_remarks(sets: Sequence[CardSet]) -> list[str]:
    """What the files of these cards say of themselves, where they were measured."""
    measured = [each.card for each in sets if each.card.is_measured]
    return [line for card in measured for line in card.remarks(torch.__version__)]


def time_loader(loader: Iterable[Any], batches: int) -> LoaderSeconds | None:
    """Time a loader on this machine; None if it has one batch at most. The first one waits for
    workers to begin, and does not count."""
    taken: list[float] = []
    before = time.perf_counter()
    for _ in islice(loader, BATCHES):
        now = time.perf_counter()
        taken.append(now - before)
        before = now
        if sum(taken) > ENOUGH and len(taken) > 1:
            break
    return LoaderSeconds(median(taken[1:]), batches) if len(taken) > 1 else None
