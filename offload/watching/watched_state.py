"""Python values that a step read while it was traced, and whether they are still the same.

    cfg.beta -> 0.5   _forward_hooks -> {}   phases -> [warm, cold]     read, expected
    later: 0.25                                                         cfg.beta is 0.25 after 0.5

Values are compared by identity. Plain values, and containers of them, may also be equal.
"""

from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from operator import attrgetter, is_
from types import CellType
from typing import Any

import numpy as np

PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
EXACT = (bool, int, str, bytes, type(None))


class Missing:
    """The value of a name that does not exist."""

    def __repr__(self) -> str:
        return "absent"


MISSING = Missing()
cell_contents = attrgetter("cell_contents")
Place = tuple[int, Any]
"""The id of what holds a value, and the value's name or number in it."""


@dataclass(frozen=True, slots=True)
class Change:
    """A value that is not what it was when the step was traced."""

    place: Place
    label: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.label} is {brief(self.now)} after {brief(self.before)}"


@dataclass(frozen=True, slots=True, eq=False)
class WatchedValues:
    """Some values of one holder: names of a dict or a class, items of a list, one cell."""

    holder: Any
    keys: tuple[Any, ...]
    values: tuple[Any, ...]
    label: Callable[[Any], str]
    whole: bool = False
    """Whether another key would be a change, too."""

    get: Callable[[Any, Any], Any] = field(init=False)
    """What a dict has by this key. A class above dict may have another method of that name."""

    def __post_init__(self) -> None:
        own = self.holder
        get = partial(dict.get, own) if isinstance(own, dict) else getattr(own, "get", None)
        object.__setattr__(self, "get", own.get if type(own) is dict else get)

    def changes(self, now: Mapping[Any, Any] | None = None) -> Iterator[Change]:
        """Compare with `now`, or with what the dict has."""
        get = self.get if now is None else now.get
        for key, before in zip(self.keys, self.values, strict=True):
            found = get(key, MISSING)
            if found is not before and not alike(found, before):
                yield Change((id(self.holder), key), self.label(key), before, found)
        now = contents(self.holder) if now is None and self.whole else now or {}
        if self.whole and len(now) > len(self.keys):
            for key in [key for key in now if key not in self.keys]:
                yield Change((id(self.holder), key), self.label(key), MISSING, now[key])


@dataclass(frozen=True, slots=True, eq=False)
class WatchedState:
    """All the values that one graph depends on."""

    dicts: tuple[WatchedValues, ...] = ()
    """Names of dicts and of classes."""
    lists: tuple[WatchedValues, ...] = ()
    """Lists, deques and sets, whole."""
    others: tuple[tuple[Callable[[], Mapping[Any, Any]], WatchedValues], ...] = ()
    """Cells, slots and arrays, with the function that reads them."""
    empty: tuple[Collection[Any], ...] = ()
    """Containers that were empty: most of them are dicts of hooks."""
    empty_labels: tuple[str, ...] = ()
    cells: tuple[CellType, ...] = field(init=False)
    """The cells among `others`, which are compared faster."""
    cell_values: tuple[Any, ...] = field(init=False)
    other_than_cells: tuple[Any, ...] = field(init=False)

    def __post_init__(self) -> None:
        cells = [each for _, each in self.others if type(each.holder) is CellType and each.keys]
        rest = tuple(one for one in self.others if type(one[1].holder) is not CellType)
        object.__setattr__(self, "cells", tuple(each.holder for each in cells))
        object.__setattr__(self, "cell_values", tuple(each.values[0] for each in cells))
        object.__setattr__(self, "other_than_cells", rest)

    def same(self) -> bool:
        """Whether all values are what they were."""
        if any(self.empty):
            return False
        for each in self.dicts:
            if each.whole and len(each.holder) != len(each.keys):
                return False
            now = map(each.get, each.keys, repeat(MISSING))
            if not all(map(is_, now, each.values)) and any(each.changes()):
                return False
        for each in self.lists:
            items = each.holder
            if len(items) != len(each.values):
                return False
            if not all(map(is_, items, each.values)) and any(each.changes(contents(items))):
                return False
        try:
            cells = all(map(is_, map(cell_contents, self.cells), self.cell_values))
        except ValueError:  # a cell is empty now
            cells = False
        others = self.others if not cells else self.other_than_cells
        return not any(any(each.changes(read())) for read, each in others)

    def changes(self) -> list[Change]:
        """Return all values that have changed."""
        found = [
            Change((id(own), None), label, "empty", f"{len(own)} items")
            for own, label in zip(self.empty, self.empty_labels, strict=True)
            if len(own)
        ]
        for each in self.dicts:
            found += each.changes()
        for each in self.lists:
            found += each.changes(contents(each.holder))
        for read, each in self.others:
            found += each.changes(read())
        return found

    def reader(self, place: Place) -> Callable[[], Any]:
        """Return a function that reads the present value of a place."""
        number, key = place
        for each in self.dicts:
            if id(each.holder) == number:
                return lambda: each.get(key, MISSING)
        for each in self.lists:
            if id(each.holder) == number:
                return lambda: contents(each.holder)[key]
        for read, each in self.others:
            if id(each.holder) == number:
                return lambda: read()[key]
        raise KeyError(place)

    def without(self, places: Collection[Place]) -> "WatchedState":
        """Leave out these places."""
        if not places:
            return self

        def kept(each: WatchedValues) -> WatchedValues:
            left = [
                (key, value)
                for key, value in zip(each.keys, each.values, strict=True)
                if (id(each.holder), key) not in places
            ]
            if len(left) == len(each.keys):
                return each
            keys, values = [key for key, _ in left], [value for _, value in left]
            return WatchedValues(each.holder, tuple(keys), tuple(values), each.label)

        empties = [
            (own, label)
            for own, label in zip(self.empty, self.empty_labels, strict=True)
            if (id(own), None) not in places
        ]
        lists = [each for each in self.lists if kept(each) is each]
        shorter = [each for each in self.lists if kept(each) is not each]
        others = [(read, kept(each)) for read, each in self.others]
        others += [(_reader(each.holder), kept(each)) for each in shorter]
        return WatchedState(
            tuple(map(kept, self.dicts)),
            tuple(lists),
            tuple(others),
            tuple(own for own, _ in empties),
            tuple(label for _, label in empties),
        )


def _reader(container: Any) -> Callable[[], Mapping[Any, Any]]:
    return lambda: contents(container)


def contents(container: Any) -> Mapping[Any, Any]:
    """Return the items of a container by key; those of a list or a deque by number."""
    if isinstance(container, dict):
        return dict(dict.items(container))
    if isinstance(container, set | frozenset):
        return dict.fromkeys(container, True)
    if isinstance(container, np.ndarray):
        return {None: container.copy()}
    if isinstance(container, array | bytearray):
        return {None: bytes(container)}
    return dict(enumerate(container))


def alike(one: Any, other: Any, depth: int = 8) -> bool:
    """Whether two values are the same object, or equal plain values, or containers of such."""
    if one is other:
        return True
    kind = type(one)
    if kind is not type(other):
        return False
    if isinstance(one, EXACT):
        return bool(one == other)
    if isinstance(one, PLAIN):
        return repr(one) == repr(other)  # as text, nan is nan, and 0.0 is not -0.0
    if kind is np.ndarray:
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
    if depth and kind in (tuple, list, deque, dict, set, frozenset):
        left, right = contents(one), contents(other)
        return len(left) == len(right) and all(
            key in right and alike(value, right[key], depth - 1) for key, value in left.items()
        )
    return False


def brief(value: Any) -> str:
    """Say a value on one line."""
    said = repr(value) if isinstance(value, (*PLAIN, Missing)) else _named(value)
    return said if len(said) <= 60 else f"{said[:57]}..."


def _named(value: Any) -> str:
    if isinstance(value, dict | list | tuple | set | frozenset | deque):
        return repr(value) if _is_short(value) else f"a {type(value).__name__} of {len(value)}"
    name = getattr(value, "__qualname__", None)
    return str(name) if name else f"a {type(value).__name__}"


def _is_short(value: Any) -> bool:
    inside: Sequence[Any] = list(value.values()) if isinstance(value, dict) else list(value)
    return len(inside) <= 8 and all(isinstance(item, PLAIN) for item in inside)
