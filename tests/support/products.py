"""Parametrisations that are products: all of one in tier `all`, a cover of it before.

    @pytest.mark.parametrize("budget, engine, order", every_pair(BUDGETS, ENGINES, ORDERS))

Faults come of one value or of two that meet; three that must meet are rare. `every_pair` runs each
two values of different axes together at least once, `every_value` each value. What else the product
holds carries the marker `full`, so that one list serves all tiers and a test's name is the same in
each.
"""

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import hypothesis
import pytest

Row = tuple[int, ...]
"""A place in each axis."""


def pairwise(*lengths: int) -> list[Row]:
    """Rows of the product of so long axes, few of them, that have every two places together.

    Greedy: the row with the most pairs that are still missing is next, the first of several.
    """
    rows = [*product(*map(range, lengths))]
    missing = {pair for row in rows for pair in pairs(row)}
    chosen: list[Row] = []
    while missing:
        best = max(rows, key=lambda row: len(missing & pairs(row)))
        missing -= pairs(best)
        chosen.append(best)
    return chosen


def pairs(row: Row) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    """Every two (axis, place) of a row; of a single axis its place with itself."""
    places = [*enumerate(row)]
    return {*combinations(places, 2)} if len(row) > 1 else {(places[0], places[0])}


def diagonal(*lengths: int) -> list[Row]:
    """As many rows as the longest axis has places: each place of each axis is there."""
    return [tuple(step % length for length in lengths) for step in range(max(lengths))]


def every_pair(*axes: Iterable[Any]) -> list[Any]:
    """The product; what `pairwise` does not need of it is marked `full`."""
    held = [[*axis] for axis in axes]
    return marked(held, pairwise(*map(len, held)))


def every_value(*axes: Iterable[Any]) -> list[Any]:
    """The product; what `diagonal` does not need of it is marked `full`."""
    held = [[*axis] for axis in axes]
    return marked(held, diagonal(*map(len, held)))


def only_first(*values: Any) -> list[Any]:
    """All values; those after the first are marked `full`."""
    return marked([[*values]], [(0,)])


def marked(axes: Sequence[Sequence[Any]], kept: Sequence[Row]) -> list[Any]:
    """A value may be a `pytest.param` that has marks of its own."""
    found = []
    for row in product(*(range(len(axis)) for axis in axes)):
        values = [axis[place] for axis, place in zip(axes, row, strict=True)]
        given = [v if isinstance(v, type(pytest.param())) else pytest.param(v) for v in values]
        marks = [mark for one in given for mark in one.marks]
        marks += [] if row in kept else [pytest.mark.full]
        found.append(pytest.param(*(value for one in given for value in one.values), marks=marks))
    return found


def examples(wanted: int) -> int:
    """`wanted` in tier `ci`, fewer before, more in tier `all`: conftest.py says how many."""
    return max(1, wanted * hypothesis.settings().max_examples // 100)
