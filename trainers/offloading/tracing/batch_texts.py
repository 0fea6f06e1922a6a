"""Text in a batch (file names, for example) differs from batch to batch.

    batch {"x": tensor, "name": ["a.jpg", ...]}   traced with stand-ins   {"out": .., "name": ..}

If a step only returns the text, one graph serves every text: the step is traced with stand-ins.
If a step reads the text, it is traced with the real text and needs one graph per text.
"""

from typing import Any, NoReturn, Self

from offload import CaptureError
from offload.watching.value_kinds import StandIn


class BatchText(str, StandIn):
    """Stands for a text of the batch. A step may return it, but every other use is refused."""

    number: int
    """The position among the texts of the batch."""

    @classmethod
    def several(cls, count: int, second: bool) -> list[Self]:
        """Make `count` stand-ins. The second trace gets other letters: if the letters matter, the
        two traces differ, and that is noticed."""
        found = [cls(f"text {number}{' again' if second else ''}") for number in range(count)]
        for number, text in enumerate(found):
            text.number = number
        return found

    def _used(self, *_: Any) -> NoReturn:
        raise CaptureError("the step reads the text of the batch")

    def __getattribute__(self, name: str) -> Any:
        if name == "number" or name.startswith("_"):
            return super().__getattribute__(name)
        self._used()

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _used  # type: ignore[assignment]
    __len__ = __iter__ = __getitem__ = __contains__ = __hash__ = _used  # type: ignore[assignment]
    __add__ = __mul__ = __rmul__ = __mod__ = __str__ = __format__ = _used  # type: ignore[assignment]
