"""Many modules gather outputs in a list (`self.outputs.append(loss)`); such appends are deferred.

    while it is traced     self.outputs.append(loss)    the append is only noted
    after every step       self.outputs.append(0.31)    in its order among self.log and metrics

The list grows from step to step, so a step that also reads the list cannot be captured. C code
reads a list without its methods (`torch.stack(self.outputs)`). So the second trace finds a list
empty that the first one has appended to: whoever reads it does something else there.
"""

import sys
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from offload import CaptureError
from offload.program.frames import say_frame, user_frame
from offload.watching.value_kinds import StandIn
from offload.watching.watched_state import PLAIN
from trainers.offloading.tracing.side_effects import TraceNotes


def _reading(method: str) -> Any:
    """A method of lists that reads one."""

    def read(self: "GatheredList", *arguments: Any) -> Any:
        self._looked()
        return getattr(list, method)(self, *arguments)

    return read


class GatheredList(list[Any], StandIn):
    """Stands for a list of the module while a step is traced."""

    def __init__(
        self, owner: str, name: str, real: Callable[[], list[Any]], notes: TraceNotes, empty: bool
    ) -> None:
        """`owner`: the module's attribute that is the list, or has it. `real` returns the module's
        list of the moment when it is called. `empty`: the step finds nothing in it."""
        super().__init__(() if empty else real())
        self.owner, self.name, self._real, self._notes = owner, name, real, notes
        self.read = self.appended = False
        self._held = super().__len__() > 0

    @property
    def is_watched(self) -> bool:
        """Whether the step depends on what is in the list, or may: C code may have read it."""
        return self.read or (self._held and not self.appended)

    def append(self, thing: Any, /) -> None:
        self._note("append", thing)

    def extend(self, things: Any, /) -> None:
        self._note("extend", list(things))

    def __iadd__(self, things: Any, /) -> "GatheredList":  # type: ignore[override]
        self.extend(things)
        return self

    def _note(self, method: str, thing: Any) -> None:
        self.appended = True
        super().clear()  # C code that bypasses the methods below must not find old contents
        self._check()
        self._notes.call(
            f"{self.name}.{method}", lambda it: getattr(self._real(), method)(it), (thing,), {}
        )

    def _check(self) -> None:
        if self.appended and self.read:
            self._refuse()

    def _refuse(self, *_: Any) -> NoReturn:
        raise CaptureError(
            f"{_users_line()}: the step appends to {self.name} and also reads or"
            " changes it. Its content differs in every step, so a captured step cannot use it."
            " Read it in a hook (on_..._epoch_end)"
        )

    def _looked(self) -> None:
        self.read = True
        self._check()

    def __radd__(self, other: Any) -> Any:
        self._looked()
        return other + list.copy(self)

    __iter__, __len__, __getitem__, __contains__, __reversed__, copy, count, index = map(
        _reading,
        ("__iter__", "__len__", "__getitem__", "__contains__", "__reversed__", "copy", "count",
         "index"),
    )  # fmt: skip
    __add__, __mul__, __rmul__, __eq__, __ne__, __repr__ = map(
        _reading, ("__add__", "__mul__", "__rmul__", "__eq__", "__ne__", "__repr__")
    )
    pop = clear = insert = remove = sort = reverse = _refuse  # type: ignore[assignment]
    __setitem__ = __delitem__ = __imul__ = _refuse  # type: ignore[assignment]


class GatheredLists(StandIn):
    """Stands for a list or a dict of such lists. A step may take one of them, whose place in it no
    other one changes."""

    def __init__(self, name: str, lists: dict[Any, GatheredList]) -> None:
        self.__dict__.update(name=name, lists=lists)

    def __getitem__(self, key: Any) -> GatheredList:
        lists = self.__dict__["lists"]
        if not isinstance(key, Hashable) or key not in lists:
            self._refuse()
        return lists[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        if value is not self[key]:  # `self.outs[0] += [loss]` puts the list where it is
            self._refuse()

    def _refuse(self, *_: Any) -> NoReturn:
        name = self.__dict__["name"]
        raise CaptureError(
            f"{_users_line()}: the step looks through {name} or changes it, and a captured step may"
            f" only take one list of it by its place or key, as in {name}[0].append(loss)"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    __iter__ = __len__ = __contains__ = __delitem__ = __bool__ = _refuse
    __add__ = __iadd__ = __or__ = __ior__ = __repr__ = _refuse  # type: ignore[assignment]
    __eq__ = __ne__ = __hash__ = _refuse  # type: ignore[assignment]


def _users_line() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return say_frame(user_frame(frame))


@contextmanager
def gathered(
    module: torch.nn.Module,
    notes: TraceNotes,
    empty: Container[str],
    known: dict[str, GatheredList],
) -> Iterator[None]:
    """Note appends to the module's lists instead of making them. `known`: the stand-ins by name,
    which are the same in all such blocks of a trace. Those whose name is in `empty` have nothing in
    them."""
    own = vars(module)
    before: dict[str, Any] = {}

    def stand_in(owner: str, path: str, real: Callable[[], list[Any]]) -> GatheredList:
        if path not in known:
            known[path] = GatheredList(owner, path, real, notes, path in empty)
        return known[path]

    def inner(owner: str, key: Any) -> GatheredList:
        return stand_in(owner, f"self.{owner}[{key!r}]", lambda: own[owner][key])

    for name, value in own.items():
        if type(value) in (list, dict) and _may(value):
            before[name] = value
    for name, value in before.items():
        if isinstance(value, dict) or _has_lists(value):
            keys = value if isinstance(value, dict) else range(len(value))
            own[name] = GatheredLists(f"self.{name}", {key: inner(name, key) for key in keys})
        else:
            own[name] = stand_in(name, f"self.{name}", lambda name=name: own[name])
    try:
        yield
    finally:
        own.update(before)


def _may(value: list[Any] | dict[Any, Any]) -> bool:
    """Whether a step may gather in this list, or in a list in it. A list of plain numbers is taken
    for a setting."""
    inner = [*value.values()] if isinstance(value, dict) else value
    if _has_lists(inner):
        return any(map(_may, inner))
    return isinstance(value, list) and not (value and all(isinstance(x, PLAIN) for x in value))


def _has_lists(things: Sequence[Any]) -> bool:
    return len(things) > 0 and all(type(thing) is list for thing in things)
