"""Many modules gather outputs in a list (`self.outputs.append(loss)`); such appends are deferred.

    while it is traced     self.outputs.append(loss)    the append is only noted
    after every step       self.outputs.append(0.31)    in its order among self.log and metrics

The list grows from step to step, so a step that also reads the list cannot be captured.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from offload import CaptureError
from offload.program.frames import say_frame, user_frame
from offload.watching.value_kinds import StandIn
from offload.watching.watched_state import PLAIN
from trainers.offloading.tracing.side_effects import TraceNotes


class GatheredList(list[Any], StandIn):
    """Stands for a list of the module while a step is traced."""

    def __init__(self, name: str, real: Callable[[], list[Any]], notes: TraceNotes) -> None:
        """`real` returns the module's list of the moment when it is called."""
        super().__init__(real())
        self.name, self._real, self._notes = name, real, notes
        self.read = self.appended = False

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
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename == __file__:
            frame = frame.f_back
        raise CaptureError(
            f"{say_frame(user_frame(frame))}: the step appends to {self.name} and also reads or"
            " changes it. Its content differs in every step, so a captured step cannot use it."
            " Read it in a hook (on_..._epoch_end)"
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
def gathered(module: torch.nn.Module, notes: TraceNotes) -> Iterator[list[str]]:
    """Note appends to the module's lists instead of making them. The list that is yielded holds, at
    the end, the names of the lists that were read."""
    own = vars(module)
    before = {name: value for name, value in own.items() if type(value) is list and _may(value)}
    made: list[tuple[str, GatheredList]] = []

    def stand_in(name: str, path: str, real: Callable[[], list[Any]]) -> GatheredList:
        made.append((name, GatheredList(path, real, notes)))
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
        names += [name for name, gathering in made if gathering.read]


def _may(value: Sequence[Any]) -> bool:
    """Whether a step may gather in this list. A list of plain numbers is taken for a setting."""
    return not value or not all(isinstance(thing, PLAIN) for thing in value)
