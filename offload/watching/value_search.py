"""Looks into the values that a traced step reads, and notes the places where they are kept.

an attribute      of the object, of its class, absent, or in a slot
a container       whole: dict, list, set, deque, array, and the containers in it
a function        its closure and its defaults; when it is called, the globals that it names
"""

import gc
import sys
from contextvars import ContextVar
from functools import partial
from io import IOBase
from threading import local
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
from offload.torch_seams import HELD, FakeTensor
from offload.watching.executed_code import has_closures, is_read, names_of
from offload.watching.holders import Holder, Items, KnownGenerator, Names, One, inside
from offload.watching.spies import METHODS, Spies
from offload.watching.value_kinds import (
    CONTAINERS,
    DICE,
    FIXED,
    OPAQUE,
    file_of,
    is_common,
    is_iterator,
    is_looked_into,
    is_of_ours,
    is_users,
)
from offload.watching.watched_state import MISSING, PLAIN

MOST = 65_536
"""A container with more items is not watched, but named."""
WHOLE = frozenset({"__dict__", "__getstate__", "__reduce_ex__", "__copy__", "__deepcopy__"})
"""Whoever reads one of these sees all attributes of an object: `vars`, `copy`, `pickle`."""
MADE_BY_DATACLASSES = "__create_fn__"
"""Nobody changes the closures of such functions."""
NOT_A_VALUE = frozenset({"__dict__", "__weakref__", "__doc__", "__module__", *METHODS})


class ValueSearch:
    """Finds the holders of all values that one step reads or writes."""

    def __init__(self) -> None:
        self.holders: dict[Any, Holder] = {}
        self.dice: list[KnownGenerator] = []
        self.too_large: list[str] = []
        """Containers that are not watched, because they are too large."""
        self.spies = Spies(self._read, self._write)
        self._labels: dict[int, str] = {}
        self._alive: dict[int, Any] = {}
        """Objects that were met, kept so that no new object gets the id of one."""
        self._known: set[tuple[int, str]] = set()
        self._functions: set[CodeType] = set()
        self._called: set[CodeType] = set()

    def forget(self) -> None:
        """Let go of all that was met. Then what the traces made can be told by being dead."""
        for kept in (self._alive, self._labels, self._known, self._functions, self._called):
            kept.clear()

    def keep(self, thing: Any) -> None:
        self._alive[id(thing)] = thing

    # ---- reads and writes ------------------------------------------------------------------------

    def _read(self, thing: Any, name: str, value: Any) -> None:
        known = (id(thing), name)
        if known in self._known:
            return
        if name.startswith("__"):
            if name in WHOLE and (name != "__dict__" or _is_of_the_users(sys._getframe(2))):
                self.meet(_dict_of(thing), self._label(thing))
            return
        if is_of_ours(value):
            return
        self._known.add(known)
        self._alive[known[0]] = thing
        own, label = _dict_of(thing), self._label(thing)
        if own is not None and name in own:
            self.names(own, label).note(name)
        elif (held := _held(own, name)) is not None:
            self.names(held, label).note(name)
            value = held[name]
        else:
            if own is not None:
                self.names(own, label).note(name)
            self._read_class(thing, name, label)
        self.meet(value, f"{label}.{name}")

    def _write(self, thing: Any, name: str) -> None:
        own, label = _dict_of(thing), self._label(thing)
        self._alive[id(thing)] = thing
        if own is not None:
            self.names(own, label).note(name)
            for kind in HELD if isinstance(thing, torch.nn.Module) else ():
                if kind in own:
                    self.names(own[kind], label).note(name)
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
                self.meet(found, f"{kind.__qualname__}.{name}")
                return

    def _slot(self, thing: Any, name: str, descriptor: Any, label: str) -> None:
        key = (id(thing), name)
        if key not in self.holders:
            self.holders[key] = One.slot(thing, name, descriptor, label)

    def names(self, own: dict[str, Any], label: str) -> Names:
        found = self.holders.get(id(own))
        if not isinstance(found, Names | Items):
            found = self.holders[id(own)] = Names(own, label)
        return found  # type: ignore[return-value]

    def _class_names(self, kind: type) -> Names:
        found = self.holders.get(id(kind))
        if not isinstance(found, Names):
            found = Names(vars(kind), kind.__qualname__, owner=kind)
            self.holders[id(kind)] = found
        return found

    def _label(self, thing: Any) -> str:
        return self._labels.get(id(thing), type(thing).__name__)

    # ---- values ----------------------------------------------------------------------------------

    def meet(self, value: Any, label: str) -> None:
        """Look into a value that the step can now use."""
        if isinstance(value, PLAIN) or id(value) in self._labels or is_of_ours(value):
            return
        kind = type(value)
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
            value, kind = vars(value), dict  # attributes that Python code gave to a tensor
        if isinstance(value, OPAQUE) or value is MISSING or isinstance(value, ModuleType):
            return
        self._labels[id(value)] = label
        self._alive[id(value)] = value
        if kind is FunctionType:
            self._meet_function(value)
        elif isinstance(value, CONTAINERS):
            self._meet_container(value, label)
            if is_looked_into(kind):
                self.spies.spy_on(kind)
        elif isinstance(value, FIXED):
            for key, item in inside(value):
                self.meet(item, f"{label}[{key!r}]")
        elif kind is MethodType:
            self.meet(value.__func__, label)
            self.meet(value.__self__, label)
        elif kind is partial:
            self.meet(value.func, label)
            self.meet(value.args, f"{label}.args")
            self.meet(value.keywords, f"{label}.keywords")
        elif kind is ref:
            self.meet(value(), label)
        elif isinstance(value, staticmethod | classmethod):
            self.meet(value.__func__, label)
        elif isinstance(value, property):
            for function in (value.fget, value.fset):
                self.meet(function, label)
        elif isinstance(value, type):
            self._meet_class(value)
        elif isinstance(value, SimpleNamespace | local):
            self.meet(vars(value), label)
        elif kind is ContextVar:
            self.holders[id(value)] = One.context(value, label)
        elif isinstance(value, IOBase):
            raise CaptureError(
                f"the step uses {label}, an open file, and no Python runs in a captured step. Use"
                " it in a hook (on_train_batch_end)"
            )
        elif isinstance(value, DICE):
            self.dice.append(KnownGenerator(value, label))
        elif is_iterator(value):
            raise CaptureError(
                f"the step uses {label}, a {kind.__name__}: what it gives next differs in every"
                " step. Call next() in a hook (on_train_batch_start), and read what it gave"
            )
        elif is_looked_into(kind):
            self.spies.spy_on(kind)
            self.meet(kind, kind.__qualname__)

    def _meet_container(self, value: Any, label: str) -> None:
        size = value.size if isinstance(value, np.ndarray) else len(value)
        if size > MOST:
            self.too_large.append(f"{label} ({size} items)")
            return
        known = self.holders.get(id(value))
        self.holders[id(value)] = items = Items(value, label)
        if known is not None:
            items.first.update({k: v for k, v in known.first.items() if v is not MISSING})
        for key, item in inside(value):
            if not isinstance(item, PLAIN):
                self.meet(item, f"{label}[{key!r}]")

    def _meet_class(self, kind: type) -> None:
        """Note all names of a class that the user wrote."""
        for each in kind.__mro__:
            if is_users(each) and is_read(file_of(each)) and INSTALLED not in file_of(each):
                for name, value in list(vars(each).items()):
                    if name not in NOT_A_VALUE:
                        self._class_names(each).note(name)
                        if not isinstance(value, FunctionType):
                            self.meet(value, f"{each.__qualname__}.{name}")

    def _meet_function(self, function: FunctionType) -> None:
        code = function.__code__
        self.meet(getattr(function, "__wrapped__", None), function.__qualname__)
        if has_closures(code.co_filename):
            for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
                self._meet_cell(cell, f"{function.__qualname__}: {name}")
        if is_read(code.co_filename):
            self._functions.add(code)
            self.meet(vars(function), function.__qualname__)
            for default in (function.__defaults__, function.__kwdefaults__):
                self.meet(default, f"{function.__qualname__}: a default")

    def _meet_cell(self, cell: CellType, label: str) -> None:
        if id(cell) not in self.holders:
            self.holders[id(cell)] = found = One.cell(cell, label)
            self.meet(found.first[label], label)

    def meet_code(self, code: CodeType, space: dict[str, Any]) -> None:
        """Note the globals that a function names, before it runs."""
        if is_common(str(space.get("__name__", ""))):  # generated by a library, in no file
            return
        self._called.add(code)
        names, where = names_of(code), str(space.get("__name__", ""))
        self._meet_names(space, names, where, 2)
        for name in names & sys.modules.keys():  # a module that the function itself imports
            self._meet_module(name, sys.modules[name], names, 1)

    def _meet_names(self, space: Any, names: frozenset[str], where: str, depth: int) -> None:
        """Note these names of a module or of a class, and those of the modules among them."""
        for name in names:
            value = space.get(name, MISSING)
            if value is MISSING or name.startswith("__"):
                continue
            if isinstance(value, ModuleType):
                self._meet_module(name, value, names, depth)
                continue
            if isinstance(space, dict):
                self.names(space, where).note(name)
            self.meet(value, f"{where}.{name}")

    def _meet_module(self, name: str, module: Any, names: frozenset[str], depth: int) -> None:
        file = getattr(module, "__file__", None) or ""
        if name == "os":
            self.meet(vars(module.environ)["_data"], "os.environ")
        elif depth and file and is_read(file):
            self._meet_names(vars(module), names, module.__name__, depth - 1)

    def meet_closures(self) -> None:
        """Find the closures that were called and that no read has led to."""
        wanted = {
            code
            for code in self._called
            if code not in self._functions
            and {*code.co_freevars} - {"__class__"}
            and not code.co_qualname.startswith(MADE_BY_DATACLASSES)
        }
        if not wanted:
            return
        # A list of all objects would do, but Python fails in `tuple(generator)` if anybody else
        # holds that tuple, and another thread may be in the middle of one.
        for thing in gc.get_referrers(*wanted):
            if type(thing) is FunctionType:
                self.meet(thing, thing.__qualname__)


def _is_of_the_users(frame: Any) -> bool:
    return is_read(frame.f_code.co_filename)


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
