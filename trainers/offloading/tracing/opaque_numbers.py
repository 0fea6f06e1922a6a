"""Stand-ins for what differs in every step: the batch's index, the epoch, the loggers.

batch_idx, global_step    may be passed on and logged; any other use is refused
current_epoch             the same; a use has the step traced anew, with a graph for every epoch
self.logger                              every use is refused
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, Self

import lightning as L

from offload import CaptureError
from offload.program.frames import say_frame, user_frame
from offload.watching.value_kinds import StandIn
from trainers.lightning_seams import swap_loggers


class EpochUsed(CaptureError):
    """A step computes with the epoch, and was traced as one that does not."""


class OpaqueNumber(int, StandIn):
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

    error: type[CaptureError] = CaptureError

    def _used(self, *_: Any) -> NoReturn:
        line = say_frame(user_frame(sys._getframe(1)))
        raise self.error(f"{line}: {self.kind} uses {self.why}, or leave it out")

    # All of them: what one of these returns would be an int that nobody watches.
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __hash__ = _used  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _used  # type: ignore[assignment]
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = __pow__ = __rpow__ = _used  # type: ignore[assignment]
    __divmod__ = __rdivmod__ = __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _used  # type: ignore[assignment]
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __neg__ = __pos__ = __invert__ = _used  # type: ignore[assignment]
    __abs__ = __int__ = __float__ = __round__ = __trunc__ = __floor__ = __ceil__ = _used  # type: ignore[assignment]
    bit_length = bit_count = to_bytes = as_integer_ratio = conjugate = _used  # type: ignore[assignment]
    real = imag = numerator = denominator = property(_used)  # type: ignore[assignment]


class OpaqueProgress(OpaqueNumber):
    """The number of steps so far. Tracing with two values of it cannot show what a third value
    would do (`if self.global_step > 20`), so every use is refused."""

    @property
    def why(self) -> str:
        return (
            "global_step, which differs in every step. Keep what follows from it in a tensor"
            " (self.register_buffer) that a hook changes in place, log the number unchanged"
        )


class OpaqueEpoch(OpaqueProgress):
    """The epoch. A step that uses it is traced anew, with a graph for every epoch."""

    error = EpochUsed

    @property
    def why(self) -> str:
        return "current_epoch"


def _hook(kind: str) -> str:
    stage = kind.removesuffix("_step")
    return f"on_{'train' if stage == 'training' else stage}_batch_end"


class _ForbiddenLoggers(list[Any], StandIn):
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
