"""A graph freezes the Python values that its step read, so these reads are noted and checked.

    traced     self.net.drop.p -> 0.1   self.alpha -> 0.5   self.training -> True    read, noted
               self.net -> this module  self.scale -> this tensor, whatever its values
    later      before every step the same attributes are read; if one changed, another graph is used

`batch_idx` and the loggers change in every step: a step that uses them cannot be captured.
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
from offload.program.frames import say_frame, user_frame
from offload.torch_seams import CHILDREN, HELD
from trainers.lightning_seams import swap_loggers

PLAIN = (bool, int, float, complex, str, bytes, type(None))
KNOWN = (torch.Tensor, torch.nn.Module)
SEVERAL = 64
"""Lists and dicts with more values than this are not compared."""


@dataclass(frozen=True, slots=True, eq=False)
class WatchedValues:
    """Attributes of modules, and the values that they had while a step was traced."""

    places: tuple[tuple[dict[str, Any], str], ...]
    values: tuple[Any, ...]
    """Plain values are stored as they are; modules and tensors are stored by their `id`."""
    kept: tuple[Any, ...] = ()
    """These modules and tensors are kept alive, so that no new object gets the `id` of one."""

    def same(self) -> bool:
        """Whether all attributes still have these values."""
        return (
            tuple([_plain(own.get(name, WatchedValues)) for own, name in self.places])
            == self.values
        )

    def changed(self) -> str:
        """Say which attribute changed first, and from what to what; empty if none did."""
        for (own, name), before in zip(self.places, self.values, strict=True):
            if (now := _plain(own.get(name, WatchedValues))) != before:
                return f"{name} is {now!r} after {before!r}"
        return ""


class AttributeReads:
    """Notes which attributes of modules and hooks a traced step reads."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}

    def note(self, thing: Any, name: str) -> None:
        own = object.__getattribute__(thing, "__dict__")
        if name == CHILDREN:  # a Sequential iterates over its children without naming them
            for child in own[name]:
                self.note(thing, child)
            return
        for kind in ("", *HELD):
            held = own.get(kind, {}) if kind else own
            if name in held:
                self._found[id(held), name] = (held, name)

    def forget(self, thing: Any, names: Sequence[str]) -> None:
        """Drop attributes that the step reads, but on which its graph does not depend."""
        for name in names:
            self._found.pop((id(vars(thing)), name), None)

    def watched(self) -> WatchedValues:
        places = tuple(
            (own, name)
            for own, name in self._found.values()
            if name in own and _is_watched(own[name])
        )
        found = [own[name] for own, name in places]
        kept = tuple(value for value in found if isinstance(value, KNOWN))
        return WatchedValues(places, tuple(map(_plain, found)), kept)

    @contextmanager
    def of(self, module: torch.nn.Module, others: Sequence[Any] = ()) -> Iterator[None]:
        """Note all reads in this block. `others` are objects whose hooks are traced with the
        step."""
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
    """Return what can be compared with a later value of the same attribute."""
    if isinstance(value, KNOWN):
        return id(value)
    if isinstance(value, dict):
        return tuple((k, v) for k, v in value.items() if isinstance(v, PLAIN))
    return tuple(value) if isinstance(value, list) else value


class OpaqueNumber(int):
    """A number of the trainer that a step may pass on, log and print, but not compute with."""

    kind: str

    @classmethod
    def of(cls, kind: str, number: int) -> Self:
        """Wrap `number` for a step of this kind (training_step, ...)."""
        index = cls(number)
        index.kind = kind
        return index

    @property
    def why(self) -> str:
        return f"batch_idx, which differs in every step. Do it in a hook ({_hook(self.kind)})"

    def _used(self, *_: Any) -> NoReturn:
        line = say_frame(user_frame(sys._getframe(1)))
        raise CaptureError(f"{line}: {self.kind} uses {self.why}, or leave it out")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = _used  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _used  # type: ignore[assignment]
    __floordiv__ = __truediv__ = __rtruediv__ = __float__ = __pow__ = __and__ = _used  # type: ignore[assignment]
    __hash__ = int.__hash__


class OpaqueProgress(OpaqueNumber):
    """The epoch, or the number of steps so far. Tracing with two values of it cannot show what a
    third value would do (`if self.current_epoch > 20`), so every use is refused."""

    @property
    def why(self) -> str:
        return (
            "current_epoch or global_step, and a captured step would do the same in every epoch."
            " Set an attribute of the module in on_train_epoch_start and read that, log the number"
            " unchanged"
        )


def _hook(kind: str) -> str:
    stage = kind.removesuffix("_step")
    return f"on_{'train' if stage == 'training' else stage}_batch_end"


class _ForbiddenLoggers(list[Any]):
    kind = ""

    def _used(self, *_: Any) -> NoReturn:
        raise CaptureError(
            f"{say_frame(user_frame(sys._getframe(1)))}: {self.kind} uses the logger itself, but"
            f" no Python runs in a captured step. Use self.log, or a hook ({_hook(self.kind)})"
        )

    __len__ = __getitem__ = __iter__ = __bool__ = _used  # type: ignore[assignment]


@contextmanager
def no_loggers(trainer: L.Trainer, kind: str) -> Iterator[None]:
    """Refuse every use of the trainer's loggers while a step of this kind is traced."""
    none = _ForbiddenLoggers()
    none.kind = kind
    before = swap_loggers(trainer, none)
    try:
        yield
    finally:
        swap_loggers(trainer, before)
