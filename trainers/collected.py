"""Lists of the module's that an evaluation step appends to, as many modules gather their outputs.

    while it is traced     self.outputs.append(loss)    noted
    after every step       self.outputs.append(0.31)    in its place among self.log and metrics

The list grows from step to step: a step that appends to it and looks at it too cannot be captured.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from offload import CaptureError
from offload.frames import say_frame, user_frame
from trainers.logged import Notes
from trainers.watching import PLAIN


class Gathering(list[Any]):
    """Stands in for a list."""

    def __init__(self, name: str, real: Callable[[], list[Any]], notes: Notes) -> None:
        """`real`: the list itself, of then."""
        super().__init__(real())
        self.name, self._real, self._notes = name, real, notes
        self.read = self.appended = False

    def append(self, thing: Any, /) -> None:
        self._note("append", thing)

    def extend(self, things: Any, /) -> None:
        self._note("extend", list(things))

    def __iadd__(self, things: Any, /) -> "Gathering":  # type: ignore[override]
        self.extend(things)
        return self

    def _note(self, method: str, thing: Any) -> None:
        self.appended = True
        super().clear()  # for whoever goes past what is below
        self._check()
        self._notes.call(
            f"{self.name}.{method}", lambda it: getattr(self._real(), method)(it), (thing,), {}
        )

    def _check(self) -> None:
        if self.appended and self.read:
            self._refuse()

    def _refuse(self, *_: Any) -> NoReturn:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename == __file__:
            frame = frame.f_back
        raise CaptureError(
            f"{say_frame(user_frame(frame))}: the step appends to {self.name} and looks"
            " at it, and it is another in every step. Look at it in a hook (on_..._epoch_end)"
        )

    def _looked(self) -> None:
        self.read = True
        self._check()

    def __iter__(self) -> Iterator[Any]:
        self._looked()
        return super().__iter__()

    def __len__(self) -> int:
        self._looked()
        return super().__len__()

    def __getitem__(self, at: Any) -> Any:
        self._looked()
        return super().__getitem__(at)

    def __contains__(self, thing: Any) -> bool:
        self._looked()
        return super().__contains__(thing)

    pop = clear = insert = remove = sort = reverse = _refuse  # type: ignore[assignment]
    __setitem__ = __delitem__ = __imul__ = _refuse  # type: ignore[assignment]


@contextmanager
def gathered(module: torch.nn.Module, notes: Notes) -> Iterator[list[str]]:
    """Appends to the module's lists are only written down. Gives the names of those lists."""
    own = vars(module)
    before = {name: value for name, value in own.items() if type(value) is list and _may(value)}
    made: list[tuple[str, Gathering]] = []

    def stand_in(name: str, path: str, real: Callable[[], list[Any]]) -> Gathering:
        made.append((name, Gathering(path, real, notes)))
        return made[-1][1]

    for name, value in before.items():
        if value and all(type(inner) is list for inner in value):
            own[name] = [
                stand_in(name, f"self.{name}[{n}]", lambda name=name, n=n: own[name][n])
                for n in range(len(value))
            ]
        else:
            own[name] = stand_in(name, f"self.{name}", lambda name=name: own[name])
    names: list[str] = []
    try:
        yield names
    finally:
        own.update(before)
        names += [name for name, gathering in made if gathering.appended]


def _may(value: Sequence[Any]) -> bool:
    """Whether it may be one that is appended to: numbers of a setting are looked at as ever."""
    return not value or not all(isinstance(thing, PLAIN) for thing in value)
