"""What holds a value that Python code can read: a dict, a class, a container, a slot, a cell.

Every holder knows what it held when it was first met, what it holds now, and how to put that back.
"""

import random
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from copy import deepcopy
from types import CellType
from typing import Any

import numpy as np

from offload.watching.watched_state import MISSING, WatchedValues, contents


class Names:
    """Some names of a dict: attributes of an object, globals of a module, names of a class."""

    def __init__(self, own: Mapping[str, Any], label: str, owner: type | None = None) -> None:
        """`owner` is the class whose dict this is: such a dict cannot be written."""
        self.own = own
        self.first: dict[Any, Any] = {}
        """What the names were when they were first read."""
        self._label = label
        self._owner = owner

    def note(self, name: Any) -> bool:
        """Note this name; return whether it is new."""
        if name in self.first:
            return False
        self.first[name] = self._get(name)
        return True

    def _get(self, name: Any) -> Any:
        own = self.own
        return dict.get(own, name, MISSING) if isinstance(own, dict) else own.get(name, MISSING)

    def now(self) -> dict[Any, Any]:
        return {name: self._get(name) for name in self.first}

    def say(self, name: Any) -> str:
        return f"{self._label}.{name}" if self._label else str(name)

    def put_back(self) -> None:
        for name, value in self.first.items():
            if self._get(name) is value:
                continue
            if self._owner is not None:
                delattr(self._owner, name) if value is MISSING else setattr(
                    self._owner, name, value
                )
            elif value is MISSING:
                dict.pop(self.own, name)  # type: ignore[arg-type]
            else:
                dict.__setitem__(self.own, name, value)  # type: ignore[arg-type]

    def watched(self) -> WatchedValues:
        now = self.now()
        return WatchedValues(self.own, tuple(now), tuple(now.values()), self.say)


class Items:
    """All items of a container that can change: a dict, a list, a set, a deque, an array."""

    def __init__(self, own: Any, label: str) -> None:
        self.own = own
        self.first = dict(contents(own))
        self._label = label

    def note(self, name: Any) -> None:
        """Do nothing: all items are noted."""

    def now(self) -> Mapping[Any, Any]:
        return contents(self.own)

    def say(self, key: Any) -> str:
        return self._label if key is None else f"{self._label}[{key!r}]"

    def put_back(self) -> None:
        own, now = self.own, self.now()
        if now.keys() == self.first.keys() and all(now[key] is self.first[key] for key in now):
            return
        if isinstance(own, np.ndarray):
            own[...] = self.first[None]
            return
        if isinstance(own, array | bytearray):
            own[:] = (
                type(own)(own.typecode, self.first[None])
                if isinstance(own, array)
                else (self.first[None])
            )
            return
        if isinstance(own, dict):
            dict.clear(own)
            dict.update(own, self.first)
            return
        own.clear()
        if isinstance(own, set):
            own.update(self.first.keys())
        elif isinstance(own, list | deque):
            own.extend(self.first.values())

    def watched(self) -> WatchedValues:
        now = self.now()
        return WatchedValues(self.own, tuple(now), tuple(now.values()), self.say, whole=True)


class One:
    """One value that is read and written by functions of its own: a cell or a slot."""

    def __init__(
        self, own: Any, name: str, read: Callable[[], Any], write: Callable[[Any], Any]
    ) -> None:
        self.own = own
        self.first = {name: read()}
        self._name = name
        self._read = read
        self._write = write

    @classmethod
    def cell(cls, cell: CellType, label: str) -> "One":
        def read() -> Any:
            try:
                return cell.cell_contents
            except ValueError:  # not yet assigned, or deleted
                return MISSING

        def write(value: Any) -> None:
            if value is MISSING:
                del cell.cell_contents
            else:
                cell.cell_contents = value

        return cls(cell, label, read, write)

    @classmethod
    def context(cls, variable: ContextVar[Any], label: str) -> "One":
        return cls(variable, label, lambda: variable.get(MISSING), variable.set)

    @classmethod
    def slot(cls, thing: Any, name: str, descriptor: Any, label: str) -> "One":
        def read() -> Any:
            try:
                return descriptor.__get__(thing, type(thing))
            except AttributeError:
                return MISSING

        def write(value: Any) -> None:
            if value is MISSING:
                descriptor.__delete__(thing)
            else:
                descriptor.__set__(thing, value)

        return cls(thing, f"{label}.{name}", read, write)

    def now(self) -> dict[str, Any]:
        return {self._name: self._read()}

    def say(self, name: Any) -> str:
        return str(name)

    def put_back(self) -> None:
        if self._read() is not self.first[self._name]:
            self._write(self.first[self._name])

    def watched(self) -> WatchedValues:
        now = self.now()
        return WatchedValues(self.own, tuple(now), tuple(now.values()), self.say)


class KnownGenerator:
    """A random generator of Python or numpy: its state is what it holds."""

    def __init__(self, own: Any, label: str) -> None:
        self.label = label
        self._own = own
        self._first = self._state()

    def _state(self) -> Any:
        if isinstance(self._own, random.Random):
            return self._own.getstate()
        if isinstance(self._own, np.random.Generator):
            return deepcopy(self._own.bit_generator.state)
        return self._own.get_state()

    @property
    def drawn(self) -> bool:
        return repr(self._state()) != repr(self._first)

    def put_back(self) -> None:
        if isinstance(self._own, random.Random):
            self._own.setstate(self._first)
        elif isinstance(self._own, np.random.Generator):
            self._own.bit_generator.state = self._first
        else:
            self._own.set_state(self._first)


Holder = Names | Items | One


def inside(value: Any) -> Iterator[tuple[Any, Any]]:
    """The items of a container, with their keys."""
    if isinstance(value, np.ndarray | array | bytearray):
        return iter(())
    return iter(contents(value).items())
