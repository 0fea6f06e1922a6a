"""Text and whole numbers in a batch (names, ids) differ from batch to batch.

    batch {"x": tensor, "name": ["a.jpg", ...]}   traced with stand-ins   {"out": .., "name": ..}

If a step only returns them, one graph serves every name: the step is traced with stand-ins. If a
step reads them, it is traced with the real ones and needs one graph for each.
"""

from collections.abc import Sequence
from typing import Any, NoReturn, Self

from offload import CaptureError
from offload.watching.value_kinds import StandIn
from trainers.offloading.tracing.opaque_numbers import OpaqueNumber


class BatchText(str, StandIn):
    """Stands for a text of the batch. A step may return it, but every other use is refused."""

    number: int
    """The position among the texts of the batch."""

    @classmethod
    def at(cls, number: int, second: bool) -> Self:
        text = cls(f"text {number}{' again' if second else ''}")
        text.number = number
        return text

    def _used(self, *_: Any) -> NoReturn:
        raise CaptureError("the step reads the text of the batch")

    def __getattribute__(self, name: str) -> Any:
        if name == "number" or name.startswith("_"):
            return super().__getattribute__(name)
        self._used()

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _used  # type: ignore[assignment]
    __len__ = __iter__ = __getitem__ = __contains__ = __hash__ = _used  # type: ignore[assignment]
    __add__ = __radd__ = __mul__ = __rmul__ = __mod__ = __rmod__ = __str__ = __format__ = _used  # type: ignore[assignment]


class BatchId(OpaqueNumber):
    """Stands for a whole number of the batch. A step may return it, but every other use is refused,
    or makes the two traces differ."""

    number: int
    """The position among the names of the batch."""

    @classmethod
    def at(cls, number: int, second: bool) -> Self:
        found = cls(2 * number + second)
        found.number = number
        return found

    @property
    def why(self) -> str:
        return "a number of the batch"

    kind = "the step"


Name = BatchText | BatchId


def stand_ins(names: Sequence[str | int], second: bool) -> list[Name]:
    """A stand-in for each name. The second trace gets other ones: if it matters what they are, the
    two traces differ, and that is noticed."""
    kinds = (BatchText if isinstance(name, str) else BatchId for name in names)
    return [kind.at(number, second) for number, kind in enumerate(kinds)]
