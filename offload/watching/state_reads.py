"""Finds which Python values a traced step reads and writes, wherever they are kept.

    an attribute      a spy on the type notes it: of the object, of its class, absent, in a slot
    a container       is noted whole: dict, list, set, deque, array, and the containers in it
    a global, a cell  is noted when the function that names it is called (executed_code.py)

A spy is put on a type when a read gives an object of that type, and all spies are removed after the
trace. Not seen: state inside C extensions, calls of `object.__getattribute__`, wall clocks.
"""

import gc
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from io import IOBase
from types import (
    CellType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any
from weakref import ref

import numpy as np
import torch

from offload.errors import CaptureError
from offload.program.frames import INSTALLED
from offload.torch_seams import HELD
from offload.watching.executed_code import calls_noted, is_read, names_of
from offload.watching.frozen_state import drop_dead, frozen
from offload.watching.holders import Dice, Holder, Items, Names, One, inside
from offload.watching.spies import Spies
from offload.watching.value_kinds import (
    CONTAINERS,
    DICE,
    FIXED,
    OPAQUE,
    file_of,
    has_stand_in,
    is_iterator,
    is_looked_into,
    is_of_ours,
    is_users,
    why_kept,
)
from offload.watching.watched_state import (
    MISSING,
    PLAIN,
    Place,
    WatchedState,
    alike,
    brief,
)

MOST = 65_536
"""A container with more items is not watched, but named."""


class StateReads:
    """The places that one step reads and writes, over both its traces."""

    def __init__(self) -> None:
        self.too_large: list[str] = []
        """Containers that are not watched, because they are too large."""
        self._holders: dict[Any, Holder] = {}
        self._labels: dict[int, str] = {}
        self._alive: dict[int, Any] = {}
        """Objects that were met, kept so that no new object gets the id of one."""
        self._known: set[tuple[int, str]] = set()
        self._spies = Spies(self._read, self._write)
        self._functions: dict[CodeType, list[FunctionType]] = {}
        self._called: dict[CodeType, dict[str, Any]] = {}
        self._ignored: set[Place] = set()
        self._dice: list[Dice] = []
        self._traced = False

    # ---- what a capture does ---------------------------------------------------------------------

    @contextmanager
    def noting(self, things: Mapping[str, Any]) -> Iterator[None]:
        """Note what the step reads and writes in this block. `things` are where it begins."""
        for name, thing in things.items():
            self._meet(thing, name or type(thing).__name__)
            for path, part in thing.named_modules() if isinstance(thing, torch.nn.Module) else ():
                self._meet(part, f"{name}.{path}".strip(".") or type(thing).__name__)
        self._spies.put()
        try:
            if self._traced:
                yield
            else:
                with calls_noted(self._meet_code):
                    yield
        finally:
            self._traced = True
            self._spies.remove()
        self._meet_closures()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Note nothing in this block: no code of the user runs in it."""
        before, self._spies.noting = self._spies.noting, False
        try:
            yield
        finally:
            self._spies.noting = before

    def ignore(self, own: Any, key: Any) -> None:
        """Do not watch this place: whoever calls knows that it may change."""
        self._ignored.add((id(own), key))
        self._alive[id(own)] = own

    def add(self, own: dict[str, Any], name: str, label: str) -> None:
        """Watch a name of a dict that the step reads in a way that no spy sees."""
        self._labels.setdefault(id(own), label)
        self._names(own, label).note(name)
        self._meet(own.get(name), f"{label}.{name}")

    def present(self) -> dict[Any, Mapping[Any, Any]]:
        """Return what all noted places hold now."""
        return {key: holder.now() for key, holder in self._holders.items()}

    def left_behind(self) -> str:
        """Say what the trace left in the user's objects that is no value; empty if nothing."""
        for holder in self._holders.values():
            for key, value in holder.now().items():
                for kept in (key, value):
                    if value is not holder.first.get(key, MISSING) and has_stand_in(kept):
                        where = holder.say(None if kept is key else key)
                        return f"{where} keeps {why_kept(kept)}"
        return ""

    def changed_since(self, before: Mapping[Any, Mapping[Any, Any]]) -> str:
        """Say which place has changed since `present()` returned `before`; empty if none has. No
        trace follows."""
        for kept in (self._alive, self._known, self._functions, self._called):
            kept.clear()  # else nothing that the trace made would be dead
        drop_dead(self._holders)
        found = self._change(before)
        if found and found[0] not in before:  # it may be of the trace, and in a circle
            gc.collect()
            drop_dead(self._holders)
            found = self._change(before)
        if found:
            number, key, old, new = found
            return (
                f"{self._holders[number].say(key)} changes from {brief(old)} to {brief(new)} in a"
                " call, and a captured step runs no python. Keep it in a tensor (a buffer), or"
                " change it outside of the step"
            )
        for dice in self._dice:
            if dice.drawn:
                return (
                    f"the step draws from {dice.label}, and every step would use the number drawn"
                    " now. Draw with torch, or pass the number in as a tensor of the batch"
                )
        return ""

    def _change(self, before: Mapping[Any, Mapping[Any, Any]]) -> tuple[Any, Any, Any, Any] | None:
        for number, holder in self._holders.items():
            then, now = before.get(number, holder.first), holder.now()
            if not isinstance(holder, Items):  # names that only the second trace has read
                then = {**holder.first, **then}
            for key in {**then, **now}:
                old, new = then.get(key, MISSING), now.get(key, MISSING)
                if not (old is new or alike(old, new) or is_of_ours(old) or is_of_ours(new)):
                    return number, key, old, new
        return None

    def put_back(self) -> None:
        """Undo all that the traces changed in Python."""
        for holder in self._holders.values():
            holder.put_back()
        for dice in self._dice:
            dice.put_back()

    def state(self) -> WatchedState:
        """Return all that was noted, with the values of now."""
        self._alive.clear()
        return frozen(self._holders, self._ignored)

    # ---- reads and writes ------------------------------------------------------------------------

    def _read(self, thing: Any, name: str, value: Any) -> None:
        known = (id(thing), name)
        if known in self._known:
            return
        if name.startswith("__"):
            if name == "__dict__" and is_read(sys._getframe(2).f_code.co_filename):
                self._meet(value, self._label(thing))
            return
        if is_of_ours(value):
            return
        self._known.add(known)
        self._alive[known[0]] = thing
        own, label = _dict_of(thing), self._label(thing)
        if own is not None and name in own:
            self._names(own, label).note(name)
        elif (held := _held(own, name)) is not None:
            self._names(held, label).note(name)
            value = held[name]
        else:
            if own is not None:
                self._names(own, label).note(name)
            self._read_class(thing, name, label)
        self._meet(value, f"{label}.{name}")

    def _write(self, thing: Any, name: str) -> None:
        own, label = _dict_of(thing), self._label(thing)
        self._alive[id(thing)] = thing
        if own is not None:
            self._names(own, label).note(name)
            for kind in HELD if isinstance(thing, torch.nn.Module) else ():
                if kind in own:
                    self._names(own[kind], label).note(name)
        descriptor = _class_value(type(thing), name)
        if isinstance(descriptor, MemberDescriptorType):
            self._slot(thing, name, descriptor, label)

    def _read_class(self, thing: Any, name: str, label: str) -> None:
        passed: list[type] = []
        for kind in type(thing).__mro__:
            if is_users(kind):
                passed.append(kind)
            found = vars(kind).get(name, MISSING)
            if found is not MISSING:
                if isinstance(found, MemberDescriptorType):
                    self._slot(thing, name, found, label)
                for each in passed:
                    self._class_names(each).note(name)
                self._meet(found, f"{kind.__qualname__}.{name}")
                return

    def _slot(self, thing: Any, name: str, descriptor: Any, label: str) -> None:
        key = (id(thing), name)
        if key not in self._holders:
            self._holders[key] = One.slot(thing, name, descriptor, label)

    def _names(self, own: dict[str, Any], label: str) -> Names:
        found = self._holders.get(id(own))
        if not isinstance(found, Names | Items):
            found = self._holders[id(own)] = Names(own, label)
        return found  # type: ignore[return-value]

    def _class_names(self, kind: type) -> Names:
        found = self._holders.get(id(kind))
        if not isinstance(found, Names):
            found = Names(vars(kind), kind.__qualname__, owner=kind)
            self._holders[id(kind)] = found
        return found

    def _label(self, thing: Any) -> str:
        return self._labels.get(id(thing), type(thing).__name__)

    # ---- values ----------------------------------------------------------------------------------

    def _meet(self, value: Any, label: str) -> None:
        """Look into a value that the step can now use."""
        if isinstance(value, PLAIN) or id(value) in self._labels or is_of_ours(value):
            return
        kind = type(value)
        if isinstance(value, OPAQUE) or value is MISSING or isinstance(value, ModuleType):
            return
        self._labels[id(value)] = label
        self._alive[id(value)] = value
        if kind is FunctionType:
            self._meet_function(value)
        elif isinstance(value, CONTAINERS):
            self._meet_container(value, label)
            if is_looked_into(kind):
                self._spies.spy_on(kind)
        elif isinstance(value, FIXED):
            for key, item in inside(value):
                self._meet(item, f"{label}[{key!r}]")
        elif kind is MethodType:
            self._meet(value.__func__, label)
            self._meet(value.__self__, label)
        elif kind is partial:
            self._meet(value.func, label)
            self._meet(value.args, f"{label}.args")
            self._meet(value.keywords, f"{label}.keywords")
        elif kind is ref:
            self._meet(value(), label)
        elif isinstance(value, staticmethod | classmethod):
            self._meet(value.__func__, label)
        elif isinstance(value, property):
            for function in (value.fget, value.fset):
                self._meet(function, label)
        elif isinstance(value, type):
            self._meet_class(value)
        elif isinstance(value, SimpleNamespace):
            self._meet(vars(value), label)
        elif isinstance(value, IOBase):
            raise CaptureError(
                f"the step uses {label}, an open file, and no Python runs in a captured step. Use"
                " it in a hook (on_train_batch_end)"
            )
        elif isinstance(value, DICE):
            self._dice.append(Dice(value, label))
        elif is_iterator(value):
            raise CaptureError(
                f"the step uses {label}, a {kind.__name__}: what it gives next differs in every"
                " step. Call next() in a hook (on_train_batch_start), and read what it gave"
            )
        elif is_looked_into(kind):
            self._spies.spy_on(kind)

    def _meet_container(self, value: Any, label: str) -> None:
        size = value.size if isinstance(value, np.ndarray) else len(value)
        if size > MOST:
            self.too_large.append(f"{label} ({size} items)")
            return
        known = self._holders.get(id(value))
        self._holders[id(value)] = items = Items(value, label)
        if known is not None:
            items.first.update({k: v for k, v in known.first.items() if v is not MISSING})
        for key, item in inside(value):
            if not isinstance(item, PLAIN):
                self._meet(item, f"{label}[{key!r}]")

    def _meet_class(self, kind: type) -> None:
        """Note the names of a class that the user wrote and uses as a namespace."""
        for each in kind.__mro__:
            if is_users(each) and is_read(file_of(each)) and INSTALLED not in file_of(each):
                for name, value in list(vars(each).items()):
                    if not name.startswith("__"):
                        self._class_names(each).note(name)
                        if not isinstance(value, FunctionType):
                            self._meet(value, f"{each.__qualname__}.{name}")

    def _meet_function(self, function: FunctionType) -> None:
        code = function.__code__
        if not is_read(code.co_filename):
            wrapped = getattr(function, "__wrapped__", None)  # torch.no_grad() around the user's
            if wrapped is not None:
                self._meet(wrapped, function.__qualname__)
            return
        self._functions.setdefault(code, []).append(function)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._meet_cell(cell, f"{function.__qualname__}: {name}")
        for default in (function.__defaults__, function.__kwdefaults__):
            self._meet(default, f"{function.__qualname__}: a default")

    def _meet_cell(self, cell: CellType, label: str) -> None:
        if id(cell) not in self._holders:
            self._holders[id(cell)] = found = One.cell(cell, label)
            self._meet(found.first[label], label)

    def _meet_code(self, code: CodeType, space: dict[str, Any]) -> None:
        """Note the globals that a function names, before it runs."""
        self._called[code] = space
        where = space.get("__name__", "")
        self._meet_names(space, names_of(code), str(where), 2)

    def _meet_names(self, space: Any, names: frozenset[str], where: str, depth: int) -> None:
        """Note these names of a module or of a class, and those of the modules among them."""
        for name in names:
            value = space.get(name, MISSING)
            if value is MISSING or name.startswith("__"):
                continue
            if isinstance(value, ModuleType):
                file = getattr(value, "__file__", None) or ""
                if name == "os":
                    self._meet(vars(value.environ)["_data"], "os.environ")
                elif depth and file and is_read(file):
                    self._meet_names(vars(value), names, value.__name__, depth - 1)
                continue
            if isinstance(space, dict):
                self._names(space, where).note(name)
            self._meet(value, f"{where}.{name}")

    def _meet_closures(self) -> None:
        """Find the closures that were called and that no read has led to."""
        wanted = {
            code
            for code in self._called
            if code not in self._functions and {*code.co_freevars} - {"__class__"}
        }
        if not wanted:
            return
        for thing in gc.get_objects():
            if type(thing) is FunctionType and thing.__code__ in wanted:
                self._meet(thing, thing.__qualname__)


def _dict_of(thing: Any) -> dict[str, Any] | None:
    try:
        own = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return None
    return own if isinstance(own, dict) else None


def _held(own: dict[str, Any] | None, name: str) -> dict[str, Any] | None:
    """The dict of a module that has this parameter, buffer or submodule."""
    for kind in HELD if own is not None else ():
        held = own.get(kind)  # type: ignore[union-attr]
        if isinstance(held, dict) and name in held:
            return held
    return None


def _class_value(kind: type, name: str) -> Any:
    for each in kind.__mro__:
        if name in vars(each):
            return vars(each)[name]
    return None
