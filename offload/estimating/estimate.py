"""What a step needs of cards and how long it takes there, as a table of at most 40 columns.

GPT-2 XL: needs 29.9 GiB
card       fits     step s     $/1k
h200       whole    .22 ±5%   .21       of a measured card file: an error bar, and a price
rtx4090    22.1 G   ≥.61                 of a data sheet: it takes longer, by an unknown amount
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import wrap
from typing import Any

from offload.estimating.cheap_budgets import CheapBudget, CheapBudgets
from offload.sizes import format_size

WIDTH = 40
HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user wants to do with the step."""

    steps: int = 1000
    hours: float | None = None
    """The longest that all steps may take."""
    price: Mapping[str, float] = field(default_factory=dict[str, float])
    """By card: what an hour costs."""


@dataclass(frozen=True, slots=True)
class LoaderSeconds:
    """What the loader takes for a batch on this machine."""

    seconds: float
    batches: int
    """How many batches a step takes."""

    @property
    def step(self) -> float:
        return self.seconds * self.batches


@dataclass(frozen=True, slots=True)
class CardEstimate:
    """A step on a card. Bytes are those of one device, with what its context takes."""

    card: str
    source: str
    memory: int
    context: int
    found: CheapBudgets
    error: float | None
    """The relative error of the seconds; None: they are a lower bound."""
    unmeasured: tuple[str, ...] = ()
    """Classes of the step's work that a measured file has no rate of."""
    devices: int = 1

    @property
    def within(self) -> CheapBudget | None:
        """The step within the memory of the card."""
        return self.found.within

    @property
    def fits(self) -> str:
        """`whole`, the bytes of a budget that fits, or `no`."""
        if self.within is None:
            return "no"
        budget = self.within.budget + self.context
        return "whole" if self.found.fits_whole else format_size(budget)

    @property
    def seconds(self) -> str:
        if self.within is None:
            return "-"
        seconds = self.within.seconds
        bar = "" if self.error is None else f" ±{math.ceil(100 * self.error)}%"
        return f"{'' if bar else '≥'}{_short(seconds)}{bar}"

    def cost(self, asked: Asked) -> float | None:
        """What all steps cost; None without a price, or without an estimate of the seconds."""
        if self.card not in asked.price or self.within is None or self.error is None:
            return None
        return asked.steps * self.within.seconds / HOUR * asked.price[self.card]

    def as_dict(self) -> dict[str, Any]:
        within, found = self.within, self.found
        return {
            "card": self.card,
            "source": self.source,
            "devices": self.devices,
            "fits": self.fits,
            "seconds": None if within is None else within.seconds,
            "error": self.error,
            "is_lower_bound": self.error is None,
            "memory_bytes": self.memory,
            "context_bytes": self.context,
            "whole_bytes": found.whole.budget + self.context,
            "whole_seconds": found.whole.seconds,
            "smallest_bytes": found.smallest + self.context,
            "host_bytes": None if within is None else within.host_bytes,
            "budgets": [{"factor": factor, **_describe(budget)} for factor, budget in found.cheap],
            "unmeasured": [*self.unmeasured],
        }


@dataclass(frozen=True, slots=True)
class Estimate:
    """A step on several cards."""

    title: str
    cards: Sequence[CardEstimate]
    asked: Asked = Asked()
    loader: LoaderSeconds | None = None
    remarks: Sequence[str] = ()

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """The estimate as text of at most 40 columns."""
        lines = [*wrap(self.title, WIDTH)]
        whole = max((c.found.whole.budget + c.context for c in self.cards), default=0)
        if whole:
            lines.append(f"needs {format_size(whole)}, with the context")
        lines.append(_row("card", "fits", "step s", self._price_title()))
        lines += [
            _row(card.card, card.fits, card.seconds, _price(card.cost(self.asked)))
            for card in self.cards
        ]
        for paragraph in self._list_remarks():
            lines += wrap(paragraph, WIDTH, subsequent_indent="  ")
        return "\n".join(lines)

    def _price_title(self) -> str:
        if not self.asked.price:
            return ""
        return "$/1k" if self.asked.steps == 1000 else "$"

    def _list_remarks(self) -> Iterator[str]:
        if any(card.error is not None for card in self.cards):
            yield "±: of a measured card file, by check steps of its own"
        if any(card.within and card.error is None for card in self.cards):
            yield "≥: at a data sheet's rates; it takes longer, by an unknown amount"
        for card in self.cards:
            yield from _list_ways(card)
        if self.loader is not None:
            yield from _compare_loader(self.loader, self.cards)
        yield from self._list_cheapest()
        yield from self.remarks

    def _list_cheapest(self) -> Iterator[str]:
        limit = self.asked.hours
        costs = [(cost, c) for c in self.cards if (cost := c.cost(self.asked)) is not None]
        hours = {c.card: self.asked.steps * c.within.seconds / HOUR for _, c in costs if c.within}
        in_time = [pair for pair in costs if limit is None or hours[pair[1].card] <= limit]
        under = "" if limit is None else f" under {limit:g} h"
        if in_time:
            cost, card = min(in_time, key=lambda pair: pair[0])
            yield f"cheapest{under}: {card.card}, {hours[card.card]:.2g} h, ${_price(cost)}"
        elif costs:
            fastest = min(hours.values())
            yield f"no card with a price is done{under}: the fastest takes {fastest:.2g} h"

    def as_dict(self) -> dict[str, Any]:
        """All figures, for a program."""
        return {
            "title": self.title,
            "steps": self.asked.steps,
            "cards": [{**card.as_dict(), "cost": card.cost(self.asked)} for card in self.cards],
            "loader_seconds": None if self.loader is None else self.loader.step,
            "remarks": [*self._list_remarks()],
        }


def _list_ways(card: CardEstimate) -> Iterator[str]:
    """How a card's budgets are kept."""
    if card.unmeasured:
        classes = ", ".join(kind.replace("_", " ") for kind in card.unmeasured)
        yield f"{card.card}: its file has no rate of {classes}, so this is a lower bound"
    if card.found.within is None:
        least = format_size(card.found.smallest + card.context)
        yield f"{card.card}: no: {card.found.largest_task} needs {least}"
        return
    if not card.found.fits_whole:
        yield f"{card.card}: {_say_how(card.found.within)}, {card.found.within.factor:.2f}x"
    ways = [
        f"{factor:g}x in {format_size(budget.budget + card.context)}"
        for factor, budget in card.found.cheap
        if budget.budget + card.context <= card.memory and budget.budget < card.found.whole.budget
    ]
    if ways:
        yield f"{card.card}: {', '.join(ways)}"


def _say_how(budget: CheapBudget) -> str:
    ways = {
        f"{budget.recomputed:.0%} of activations again": budget.recomputed >= 0.005,
        f"activations of {format_size(budget.activations)} on host": budget.activations > 0,
        f"weights of {format_size(budget.weights)} on host": budget.weights > 0,
        f"states of {format_size(budget.states)} on host": budget.states > 0,
    }
    return ", ".join(way for way, is_used in ways.items() if is_used) or "packed"


def _compare_loader(loader: LoaderSeconds, cards: Sequence[CardEstimate]) -> Iterator[str]:
    yield f"data: {_short(loader.step)} s a step on this machine"
    slow = [c for c in cards if c.within is not None and c.within.seconds < loader.step]
    if slow:
        most = max(loader.step / c.within.seconds for c in slow if c.within is not None)
        reuse = math.ceil(most)
        names = ", ".join(card.card for card in slow)
        yield f"the data binds on {names}; reuse {reuse} would hide it"


def _describe(budget: CheapBudget) -> dict[str, Any]:
    return {name: getattr(budget, name) for name in CheapBudget.__slots__ if name != "factor"} | {
        "slow_down": budget.factor
    }


def _row(card: str, fits: str, seconds: str, price: str) -> str:
    return f"{card:<10.10} {fits:<9.9} {seconds:<11.11} {price:<7.7}".rstrip()


def _short(seconds: float) -> str:
    """Two or three digits: .022, .70, 2.9, 130."""
    text = f"{seconds:.2g}" if seconds < 10 else f"{seconds:.0f}"
    return text.removeprefix("0") if seconds < 1 else text


def _price(dollars: float | None) -> str:
    if dollars is None:
        return ""
    if dollars >= 1e6:
        return f"{dollars:.1e}"  # more digits are wider than the column
    return f"{dollars:.2f}" if dollars < 100 else f"{dollars:.0f}"
