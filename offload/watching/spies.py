"""Spies on types: whoever reads or writes an attribute of such an object is noticed.

kind.__getattribute__, __setattr__, __delattr__ --replaced--> note, then do as before
"""

from collections.abc import Callable
from threading import get_ident
from typing import Any

from offload.watching.value_kinds import can_be_changed, is_of_ours
from offload.watching.watched_state import MISSING

METHODS = ("__getattribute__", "__setattr__", "__delattr__")


class Spies:
    """The spies of one capture."""

    def __init__(
        self, read: Callable[[Any, str, Any], None], write: Callable[[Any, str], None]
    ) -> None:
        """`read` is called after an attribute was read, `write` before it is written."""
        self.noting = False
        """Whether spies notice anything at present."""
        self._read, self._write = read, write
        self._thread = get_ident()
        self._there = False
        self._spied: dict[type, dict[str, Any]] = {}

    def put(self) -> None:
        """Put spies on all types that are known, and on those that follow."""
        for kind in self._spied:
            self._put_on(kind)
        self._there = self.noting = True

    def remove(self) -> None:
        self._there = self.noting = False
        for kind, kept in self._spied.items():
            for name in METHODS:
                if name in kept:
                    setattr(kind, name, kept[name])
                else:
                    delattr(kind, name)

    def spy_on(self, kind: type) -> None:
        if kind in self._spied:
            return
        if not can_be_changed(kind):
            return
        own = vars(kind)
        self._spied[kind] = {name: own[name] for name in METHODS if name in own}
        if self._there:
            self._put_on(kind)

    def _put_on(self, kind: type) -> None:
        get, put, drop = (self._unspied(kind, name) for name in METHODS)

        def spy_get(thing: Any, name: str) -> Any:
            if not self.noting or get_ident() != self._thread:
                return get(thing, name)
            try:
                value = get(thing, name)
            except AttributeError:
                self._read(thing, name, MISSING)
                raise
            self._read(thing, name, value)
            return value

        def spy_put(thing: Any, name: str, value: Any) -> None:
            if self.noting and get_ident() == self._thread and not is_of_ours(value):
                self._write(thing, name)
            put(thing, name, value)

        def spy_drop(thing: Any, name: str) -> None:
            if self.noting and get_ident() == self._thread:
                self._write(thing, name)
            drop(thing, name)

        for name, spy in zip(METHODS, (spy_get, spy_put, spy_drop), strict=True):
            setattr(kind, name, spy)

    def _unspied(self, kind: type, name: str) -> Any:
        """The method of a class before any spy was put on it or on a class above it."""
        for each in kind.__mro__:
            own = self._spied[each] if each in self._spied else vars(each)
            if name in own:
                return own[name]
        raise AttributeError(name)
