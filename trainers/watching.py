"""Python values that a training step reads: what a graph would freeze.

    traced     self.net.drop.p -> 0.1   self.alpha -> 0.5   self.training -> True    read, noted
               self.net -> this module  self.scale -> this tensor, whatever its values
    later      the same attributes are looked at before every step: others, another graph

`batch_idx` and the loggers are others in every step: a step that uses them cannot be captured.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import lightning as L
import torch
from torchmetrics import Metric

from offload import CaptureError
from offload.frames import say_frame, user_frame

PLAIN = (bool, int, float, complex, str, bytes, type(None))
KNOWN = (torch.Tensor, torch.nn.Module)
SEVERAL = 64
"""Values of a list or a dict that are looked at."""


@dataclass(frozen=True, slots=True, eq=False)
class Watched:
    """Attributes of modules, and what they were."""

    places: tuple[tuple[dict[str, Any], str], ...]
    values: tuple[Any, ...]
    """Of modules and tensors: which ones they are."""
    kept: tuple[Any, ...] = ()
    """Those, so that no other gets the identity of one."""

    def same(self) -> bool:
        """Whether they still are."""
        return tuple([_plain(own.get(name, Watched)) for own, name in self.places]) == self.values

    def changed(self) -> str:
        """The first that is not."""
        for (own, name), before in zip(self.places, self.values, strict=True):
            if (now := _plain(own.get(name, Watched))) != before:
                return f"{name} is {now!r} after {before!r}"
        return ""


class Reads:
    """Notes which attributes of modules are read."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}

    def note(self, thing: Any, name: str) -> None:
        own = object.__getattribute__(thing, "__dict__")
        if name == "_modules":  # a Sequential that goes through what it has
            for child in own[name]:
                self.note(thing, child)
            return
        for kind in ("", "_parameters", "_buffers", "_modules"):
            held = own.get(kind, {}) if kind else own
            if name in held:
                self._found[id(held), name] = (held, name)

    def forget(self, thing: Any, names: Sequence[str]) -> None:
        """Attributes that the step does not depend on, though it reads them."""
        for name in names:
            self._found.pop((id(vars(thing)), name), None)

    def watched(self) -> Watched:
        places = tuple(
            (own, name)
            for own, name in self._found.values()
            if name in own and _is_watched(own[name])
        )
        found = [own[name] for own, name in places]
        kept = tuple(value for value in found if isinstance(value, KNOWN))
        return Watched(places, tuple(map(_plain, found)), kept)

    @contextmanager
    def of(self, module: torch.nn.Module, others: Sequence[Any] = ()) -> Iterator[None]:
        """While a step is traced. `others`: objects with hooks that are traced with it."""
        kinds = {
            type(part) for part in (*module.modules(), *others) if not isinstance(part, Metric)
        }
        before: dict[type, Callable[..., Any]] = {
            kind: kind.__getattribute__ for kind in kinds if "__getattribute__" not in vars(kind)
        }
        for kind, get in before.items():
            kind.__getattribute__ = self._spy(get)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for kind in before:
                del kind.__getattribute__

    def _spy(self, get: Callable[..., Any]) -> Callable[..., Any]:
        def spy(thing: Any, name: str) -> Any:
            if not name.startswith("__"):
                self.note(thing, name)
            return get(thing, name)

        return spy


def _is_watched(value: Any) -> bool:
    return isinstance(value, KNOWN) or _is_plain(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= SEVERAL and all(isinstance(v, PLAIN) for v in value)
    if isinstance(value, dict):
        return len(value) <= SEVERAL and any(isinstance(v, PLAIN) for v in value.values())
    return isinstance(value, PLAIN)


def _plain(value: Any) -> Any:
    """To be compared with a later one."""
    if isinstance(value, KNOWN):
        return id(value)
    if isinstance(value, dict):
        return tuple((k, v) for k, v in value.items() if isinstance(v, PLAIN))
    return tuple(value) if isinstance(value, list) else value


class Index(int):
    """A number of the trainer's that may be handed on, logged and printed, and not used."""

    kind: str

    @classmethod
    def of(cls, kind: str, number: int) -> Self:
        """In a step of this kind."""
        index = cls(number)
        index.kind = kind
        return index

    @property
    def why(self) -> str:
        return f"batch_idx, which is another in every step. Do it in a hook ({_hook(self.kind)})"

    def _used(self, *_: Any) -> NoReturn:
        line = say_frame(user_frame(sys._getframe(1)))
        raise CaptureError(f"{line}: {self.kind} uses {self.why}, or do without it")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = _used  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _used  # type: ignore[assignment]
    __floordiv__ = __truediv__ = __rtruediv__ = __float__ = __pow__ = __and__ = _used  # type: ignore[assignment]
    __hash__ = int.__hash__


class Progress(Index):
    """The epoch, or the number of steps so far: two values of it do not show what follows from a
    third, `if self.current_epoch > 20`."""

    @property
    def why(self) -> str:
        return (
            "current_epoch or global_step, and a captured step would do the same in every epoch."
            " Set an attribute of the module in on_train_epoch_start and read that, log it as it is"
        )


def _hook(kind: str) -> str:
    stage = kind.removesuffix("_step")
    return f"on_{'train' if stage == 'training' else stage}_batch_end"


class _NoLoggers(list[Any]):
    kind = ""

    def _used(self, *_: Any) -> NoReturn:
        raise CaptureError(
            f"{say_frame(user_frame(sys._getframe(1)))}: {self.kind} uses the logger itself, and a"
            f" captured step runs no python. Use self.log, or a hook ({_hook(self.kind)})"
        )

    __len__ = __getitem__ = __iter__ = __bool__ = _used  # type: ignore[assignment]


@contextmanager
def no_loggers(trainer: L.Trainer, kind: str) -> Iterator[None]:
    """While a step of this kind is traced."""
    before, trainer._loggers = trainer._loggers, (none := _NoLoggers())
    none.kind = kind
    try:
        yield
    finally:
        trainer._loggers = before
